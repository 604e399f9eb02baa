"""tools/walk_rollout.py, as far as it goes without servers, and what it has written into docs/rollout.md."""

from __future__ import annotations

import re

import pytest

import walk_rollout

WALKED = re.findall(
    r"^<!-- walked: ([a-z ]+) -->\n(.*?)^<!-- end -->", walk_rollout.PAGE.read_text(), re.DOTALL | re.MULTILINE
)


def test_a_part_is_replaced_and_all_else_stays_as_it_is() -> None:
    page = "a\n<!-- walked: x -->\nold\n<!-- end -->\nb\n<!-- walked: y -->\n<!-- end -->\n"
    assert walk_rollout.written(page, {"x": r"$ new \1"}) == page.replace("old\n", "```console\n$ new \\1\n```\n")


def test_a_part_for_which_the_page_has_no_place_is_an_error() -> None:
    with pytest.raises(KeyError, match="z"):
        walk_rollout.written("<!-- walked: x -->\n<!-- end -->\n", {"z": ""})


@pytest.mark.parametrize(("name", "part"), WALKED, ids=[name for name, _ in WALKED])
def test_each_part_of_the_page_was_walked(name: str, part: str) -> None:
    assert re.fullmatch(r"```console\n\$ .*\n```\n", part, re.DOTALL)


@pytest.mark.parametrize(("name", "part"), WALKED, ids=[name for name, _ in WALKED])
def test_no_part_names_a_folder_of_the_machine_that_walked(name: str, part: str) -> None:
    assert re.findall(r"/(?:root|home|tmp|work|var|Users)/\S+", part) == []


def test_every_stage_is_on_the_page() -> None:
    assert {name.partition(" ")[0] for name, _ in WALKED} >= set(walk_rollout.STAGES)
