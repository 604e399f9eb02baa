"""Writes deploy/grafana/vllm-graphfix.json, the Grafana dashboard, with Grafana's own SDK, which knows the schema.

python -m pip install 'grafana-foundation-sdk==1769699379!11.6.0'    # Python 3.11 or later
python tools/make_dashboard.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders import prometheus as prom
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prom_models

TARGET = Path(__file__).parent.parent / "deploy" / "grafana" / "vllm-graphfix.json"

ENGINE = "on (cluster, namespace, job, instance)"
"""What one scrape target is; where a label is not there, empty matches empty."""
HERE = 'namespace=~"$namespace", model_name=~"$model_name"'
SERVING = f"{ENGINE} vllm:num_requests_running{{{HERE}}}"
"""The engines of the chosen models: our own metrics do not know the model."""
CANARY = f"and {ENGINE} (graphfix_canary == 1)"
REST = f"unless {ENGINE} (graphfix_canary == 1)"
"""Also engines without the plugin."""

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
CANARY_COLOUR, REST_COLOUR = "orange", "blue"

Query = tuple[str, str]
"""PromQL, and the legend."""


def graphfix(metric: str, labels: str = "") -> str:
    """A metric of the plugin, of the chosen namespaces and models."""
    chosen = ", ".join(part for part in ('namespace=~"$namespace"', labels) if part)
    return f"({metric}{{{chosen}}} and {SERVING})"


def both(template: str, legend: str = "") -> list[Query]:
    """The query once for the canary and once for the rest; ``SIDE`` in it is what tells them apart."""
    return [(template.replace("SIDE", side), f"{name}{legend}") for side, name in ((CANARY, "canary"), (REST, "rest"))]


def mean(histogram: str) -> str:
    return (
        f"sum(rate({histogram}_sum{{{HERE}}}[$__rate_interval]) SIDE)\n"
        f"/ sum(rate({histogram}_count{{{HERE}}}[$__rate_interval]) SIDE)"
    )


def quantile(of: float, histogram: str) -> str:
    return f"histogram_quantile({of}, sum by (le) (rate({histogram}_bucket{{{HERE}}}[$__rate_interval]) SIDE))"


def share_of_finished(reasons: str) -> str:
    """The share of all requests that finished.

    *reasons* are those of vLLM, and a release that lacks one has no series of it.
    """
    finished = f"rate(vllm:request_success_total{{{HERE}}}[$__rate_interval]) SIDE"
    those = finished.replace(HERE, f'{HERE}, finished_reason=~"{reasons}"')
    return f"sum({those})\n/ sum({finished})"


def share_of_failed() -> str:
    """The share of all requests that was aborted or failed, without those that the action `abort` has ended."""
    chosen = 'namespace=~"$namespace", fix=~"shadow|kv-marks", event="aborted"'
    ended = f"sum(rate(graphfix_events_total{{{chosen}}}[$__rate_interval]) and {SERVING} SIDE) or vector(0)"
    failed, _, finished = share_of_finished("abort|error").partition("\n")
    return f"clamp_min({failed} - ({ended}), 0)\n{finished}"


def an_engine(rate: str) -> str:
    """The sum of *rate*, divided by the number of engines."""
    return (
        f"sum({rate} SIDE)\n"
        f"/ count(count by (cluster, namespace, job, instance) (vllm:num_requests_running{{{HERE}}} SIDE))"
    )


def queries(of: Sequence[Query], *, instant: bool = False) -> list[prom.Dataquery]:
    built = []
    for letter, (expression, legend) in zip("ABCDEFGH", of, strict=False):
        query = prom.Dataquery().expr(expression).legend_format(legend).ref_id(letter)
        query = query.editor_mode(prom_models.QueryEditorMode.CODE).datasource(DATASOURCE)
        query = query.instant() if instant else query.range()
        built.append(query.format(prom_models.PromQueryFormat.TABLE) if instant and not legend else query)
    return built


def number(
    title: str, description: str, expression: str, unit: str = "short", alarm: float | None = None, width: int = 3
) -> stat.Panel:
    """A figure of now; red from *alarm* on."""
    steps = [models.Threshold(value=None, color="text" if alarm is None else "green")]
    if alarm is not None:
        steps.append(models.Threshold(value=alarm, color="red"))
    panel = stat.Panel().title(title).description(description).datasource(DATASOURCE).unit(unit).span(width).height(4)
    panel = panel.thresholds(board.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).graph_mode(
        kinds.BigValueGraphMode.NONE
    )
    return panel.targets([*queries([(expression, title)], instant=True)])


def lines(
    title: str, description: str, of: Sequence[Query], unit: str = "short", width: int = 8, *, stacked: bool = False
) -> timeseries.Panel:
    panel = (
        timeseries.Panel().title(title).description(description).datasource(DATASOURCE).unit(unit).span(width).height(8)
    )
    panel = panel.fill_opacity(30 if stacked else 0).line_width(2).axis_soft_min(0)
    panel = panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .placement(kinds.LegendPlacement.BOTTOM)
        .display_mode(kinds.LegendDisplayMode.LIST)
    )
    panel = panel.tooltip(
        common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    for side, colour in (("canary", CANARY_COLOUR), ("rest", REST_COLOUR)):
        colouring = models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_regexp(f"^{side}( mean| p50)?$", [colouring])
    return panel.targets([*queries(of)])


def engines() -> table.Panel:
    """Every fix of every engine; those that are not needed have no series."""
    expression = graphfix("graphfix_fix_ranks") + " > 0"
    hidden = dict.fromkeys(("Time", "__name__", "cluster", "job", "endpoint", "container", "prometheus"), True)
    order = ("namespace", "pod", "instance", "fix", "mode", "state", "code", "Value")
    organise = models.DataTransformerConfig(
        id_val="organize",
        options={
            "excludeByName": hidden,
            "indexByName": {name: place for place, name in enumerate(order)},
            "renameByName": {"Value": "ranks"},
        },
    )
    return (
        table.Panel()
        .title("Fixes of each engine")
        .description(
            "What the ranks of each engine do about each fix, and the kind of reason; `vllm-graphfix fleet` has the "
            "reason. Fixes that this vLLM does not need are left out."
        )
        .datasource(DATASOURCE)
        .span(24)
        .height(9)
        .filterable(True)
        .targets([*queries([(expression, "")], instant=True)])
        .transformations([organise])
    )


def rollout(to: board.Dashboard) -> None:
    canaries, known = f"sum({graphfix('graphfix_canary')})", f"count({graphfix('graphfix_canary')})"
    to.with_row(board.Row("Rollout"))
    to.with_panel(
        number("Engines with the fixes", "In the rollout, and neither switched off nor only observing.", canaries)
    )
    to.with_panel(number("Engines with the plugin", "With the fixes or without.", known))
    to.with_panel(
        number(
            "Engines without the plugin",
            "Not installed there, or filtered out by VLLM_PLUGINS.",
            (
                f"count(count by (cluster, namespace, job, instance) (vllm:num_requests_running{{{HERE}}} unless "
                f"{ENGINE} graphfix_canary)) or vector(0)"
            ),
        )
    )
    to.with_panel(
        number(
            "Rollout, set",
            (
                "VLLM_GRAPHFIX_ROLLOUT of the engines: the highest value, while they restart. 0 where they are "
                "switched off or only observe."
            ),
            f"max({graphfix('graphfix_rollout_ratio')})",
            "percentunit",
        )
    )
    to.with_panel(
        number(
            "Rollout, reached",
            (
                "Share of the engines with the plugin that have the fixes. With few engines, a small percentage "
                "is met only roughly."
            ),
            f"{canaries} / {known}",
            "percentunit",
        )
    )
    to.with_panel(
        number(
            "Ranks that do not agree",
            "0 is right. Anything else can hang in a collective: take the engine out of service.",
            f"sum({graphfix('graphfix_ranks_expected')} - {ENGINE} {graphfix('graphfix_ranks_agreeing')})",
            alarm=1,
        )
    )
    wrong = graphfix("graphfix_misconfigured_variable") + " > 0"
    to.with_panel(
        number(
            "Misconfigured engines",
            "A variable has a value that means nothing, so what it is for is off or at its default. 0 is right.",
            f"count(count by (cluster, namespace, job, instance) ({wrong})) or vector(0)",
            alarm=1,
            width=6,
        )
    )
    to.with_panel(
        lines(
            "Engines with the fixes and without",
            "A stage is reached when both lines are level again.",
            [(canaries, "canary"), (f"{known} - {canaries}", "rest")],
        )
    )
    to.with_panel(
        lines(
            "States of the fixes",
            "Ranks in each state, without not-needed. failed, conflict and incompatible run stock code.",
            [(f"sum by (fix, state) ({graphfix('graphfix_fix_ranks')})", "{{fix}} {{state}}")],
            stacked=True,
        )
    )
    unknown = f"{graphfix('graphfix_ranks_expected')} unless {ENGINE} graphfix_ranks_agreeing"
    to.with_panel(
        lines(
            "Ranks",
            "All ranks, those that agree on decision and states, those without a record, and "
            "those that hang or cannot write their record: 0 is right of the last five.",
            [
                (f"sum({graphfix('graphfix_ranks_expected')})", "expected"),
                (f"sum({graphfix('graphfix_ranks_agreeing')})", "agreeing"),
                (f"sum({graphfix('graphfix_ranks_unrecorded')} > 0 or {unknown}) or vector(0)", "not known"),
                (f"sum({graphfix('graphfix_ranks_silent')})", "silent"),
                (f"sum({graphfix('graphfix_ranks_outdated')})", "record not written"),
                (f"sum({graphfix('graphfix_steps_stuck')})", "in one step"),
                (f"sum({graphfix('graphfix_records_unreadable')})", "record not readable"),
            ],
        )
    )
    to.with_panel(engines())


def events(to: board.Dashboard) -> None:
    def at_work(rate: str, state: str) -> str:
        return (
            f"sum by (fix, event) ({rate} and on (cluster, namespace, job, instance, fix) "
            f'(graphfix_fix_ranks{{state="{state}"}} > 0))'
        )

    counter = graphfix("graphfix_events_total", 'fix!~"shadow|kv-marks|abort"')
    chosen = 'namespace=~"$namespace", fix!~"shadow|kv-marks|abort"'
    rate = f"(rate(graphfix_events_total{{{chosen}}}[$__rate_interval]) and {SERVING})"
    to.with_row(board.Row("How often the fixes mattered"))
    to.with_panel(
        lines(
            "Corrected per second",
            (
                "What active fixes corrected: without them the defect would have struck. Engines outside the "
                "rollout are stock and count nothing."
            ),
            [(at_work(rate, "active"), "{{fix}} {{event}}")],
            "cps",
        )
    )
    to.with_panel(
        lines(
            "Seen and left alone, per second",
            "What observing engines would have corrected: the defects that your traffic meets.",
            [(at_work(rate, "observing"), "{{fix}} {{event}}")],
            "cps",
        )
    )
    to.with_panel(
        lines(
            "Since the engines started",
            (
                "Totals. Some defects happen once, while graphs are captured, before the first scrape: they show "
                "here and never as a rate."
            ),
            [
                (at_work(counter, "active"), "{{fix}} {{event}}: corrected"),
                (at_work(counter, "observing"), "{{fix}} {{event}}: seen"),
            ],
        )
    )


def shadow(to: board.Dashboard) -> None:
    def of(event: str) -> str:
        return graphfix("graphfix_events_total", f'fix="shadow", event="{event}"')

    def rate(event: str) -> str:
        chosen = f'namespace=~"$namespace", fix="shadow", event="{event}"'
        return f"sum(rate(graphfix_events_total{{{chosen}}}[$__rate_interval]) and {SERVING})"

    seconds = 'graphfix_detector_seconds_total{namespace=~"$namespace", fix="shadow"}'
    to.with_row(board.Row("The shadow check"))
    to.with_panel(
        lines(
            "Replays checked per second",
            "Replayed steps that were run once more without their graph. Engines with VLLM_GRAPHFIX_SHADOW only.",
            [(rate("checks"), "checks")],
            "cps",
        )
    )
    to.with_panel(
        lines(
            "Wrong replays, and graphs in quarantine",
            "Since the engines started, over all ranks. Any of them is a defect that no applied fix corrects.",
            [
                (f"sum({of('mismatches')})", "mismatches"),
                (f"sum({of('quarantined-graphs')})", "quarantined, ranks and graphs"),
                (f"sum({of('acceptance-collapses')})", "drafts refused, ranks and graphs"),
            ],
        )
    )
    to.with_panel(
        lines(
            "Time spent on checks",
            "Seconds per second over all ranks, replays included.",
            [(f"sum(rate({seconds}[$__rate_interval]) and {SERVING})", "checks")],
            "percentunit",
        )
    )


def comparison(to: board.Dashboard) -> None:
    first, next_ = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
    drafted = "sum(rate(vllm:spec_decode_num_{}_tokens_total{{" + HERE + "}}[$__rate_interval]) SIDE)"
    to.with_row(board.Row("Canary against the rest"))
    to.with_panel(
        lines(
            "Time to first token",
            "Mostly queueing and prefill, which no fix touches: if it differs, the load does.",
            both(mean(first), " mean") + both(quantile(0.95, first), " p95"),
            "s",
        )
    )
    to.with_panel(
        lines(
            "Time per token",
            "The price of a fix shows here. Where stock leaves work out, it is a few percent faster than correct code.",
            both(mean(next_), " mean") + both(quantile(0.95, next_), " p95"),
            "s",
        )
    )
    to.with_panel(
        lines(
            "Tokens per second and engine",
            "Follows the load as much as the speed.",
            both(an_engine(f"rate(vllm:generation_tokens_total{{{HERE}}}[$__rate_interval])")),
        )
    )
    to.with_panel(
        lines(
            "Requests running and waiting, per engine",
            "Both sides need the same load for the other panels to mean anything.",
            both(an_engine(f"vllm:num_requests_running{{{HERE}}}"), " running")
            + both(an_engine(f"vllm:num_requests_waiting{{{HERE}}}"), " waiting"),
        )
    )
    to.with_panel(
        lines(
            "Requests that run to their token limit",
            (
                "Share of finished requests. Gibberish and loops run to the limit; fewer on the canary is what a "
                "fix is for."
            ),
            both(share_of_finished("length|repetition")),
            "percentunit",
        )
    )
    to.with_panel(
        lines(
            "Requests aborted or failed",
            (
                "Share of finished requests. Aborted: the client went away. Requests that the action abort has ended "
                "are not among them."
            ),
            both(share_of_failed()),
            "percentunit",
        )
    )
    to.with_panel(
        lines(
            "Preemptions per second and engine",
            "Requests evicted from the KV cache: caused by load, not by a fix.",
            both(an_engine(f"rate(vllm:num_preemptions_total{{{HERE}}}[$__rate_interval])")),
            "cps",
        )
    )
    to.with_panel(
        lines(
            "Drafts accepted",
            "Speculative decoding: accepted of drafted tokens. draft-prefill-state raises it where it was near zero.",
            both(f"{drafted.format('accepted')} / {drafted.format('draft')}"),
            "percentunit",
        )
    )
    to.with_panel(
        lines(
            "Requests with NaN in their logits, per second",
            "Only with VLLM_COMPUTE_NANS_IN_LOGITS=1, which costs time.",
            both(f"sum(rate(vllm:corrupted_requests_total{{{HERE}}}[$__rate_interval]) SIDE)"),
            "cps",
        )
    )


def restarts(to: board.Dashboard) -> None:
    by = "by (cluster, namespace, job, instance)"
    gone = f'(up{{namespace=~"$namespace"}} == 0) and {ENGINE} max_over_time(vllm:num_requests_running{{{HERE}}}[1h])'
    # An engine that is gone says no more whether it is in the rollout.
    now, lately = "(graphfix_canary == 1)", "(max_over_time(graphfix_canary[1h]) == 1)"
    to.with_row(board.Row("Restarts"))
    to.with_panel(
        lines(
            "Restarts within an hour",
            (
                "Of engines that answer now. With --api-server-count above 1 vLLM exposes no start time; a "
                "counter that resets is used instead."
            ),
            both(
                f'sum((max {by} (changes(process_start_time_seconds{{namespace=~"$namespace"}}[1h])) or '
                f"max {by} (resets(vllm:generation_tokens_total{{{HERE}}}[1h]))) and {SERVING} SIDE)"
            ),
            width=12,
        )
    )
    to.with_panel(
        lines(
            "Engines that do not answer",
            "Failing scrapes of engines that were there within the last hour.",
            [
                (f"count({gone} {CANARY}) or vector(0)".replace(now, lately), "canary"),
                (f"count({gone} {REST}) or vector(0)".replace(now, lately), "rest"),
            ],
            width=6,
        )
    )
    to.with_panel(
        lines(
            "Age of the records",
            (
                "Seconds since an engine's front-end last read its ranks' records: the oldest. It grows if the "
                "status folder hangs."
            ),
            [(f"time() - min({graphfix('graphfix_records_read_timestamp_seconds')})", "oldest")],
            "s",
            width=6,
        )
    )


def variables(to: board.Dashboard) -> None:
    every = models.VariableOption(selected=True, text="All", value="$__all")
    to.with_variable(board.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for name, label, query in (
        ("namespace", "Namespace", "label_values(vllm:num_requests_running, namespace)"),
        ("model_name", "Model", 'label_values(vllm:num_requests_running{namespace=~"$namespace"}, model_name)'),
    ):
        # `.*` also where there is no such label: a Prometheus without Kubernetes has no namespaces.
        variable = board.QueryVariable(name).label(label).query(query).datasource(DATASOURCE).current(every).multi(True)
        variable = variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).include_all(True).all_value(".*")
        to.with_variable(variable)


def text() -> str:
    to = (
        board.Dashboard("vLLM graphfix")
        .uid("vllm-graphfix")
        .description(
            "Rollout of vllm-graphfix: which engines have the fixes, how often the fixes mattered, and how "
            "those engines compare with the rest."
        )
        .tags(["vllm", "graphfix"])
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("1m")
        .editable()
    )
    variables(to)
    for row in (rollout, events, shadow, comparison, restarts):
        row(to)
    built = to.build()
    for place, panel in enumerate(built.panels or (), 1):
        panel.id_val = place
    return f"{JSONEncoder(indent=2).encode(built)}\n"


def main() -> int:
    TARGET.write_text(text(), encoding="utf-8")
    print(TARGET.relative_to(TARGET.parents[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
