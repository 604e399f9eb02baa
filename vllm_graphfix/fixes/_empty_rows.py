"""Rows of length 0 that a builder of latent attention's metadata is given, for fixes of what kernels leave in them."""

from __future__ import annotations

import functools
from typing import Any

from vllm_graphfix.fix import Activity, Event, StockFunction, Wrap


def counts_empty_rows(event: Event, builder: str, module: str) -> Wrap:
    """What to put around `MLACommonMetadataBuilder.build`, which *builder*, a class of *module*, inherits.

    A replay runs no other Python of the backend. Rows of length 0 that the query starts do not show are not counted,
    since only the device knows them.
    """

    @functools.lru_cache(maxsize=64)
    def is_such_a_builder(builds: type) -> bool:
        """By name: this must not import the backend where another one is used."""
        return any(kind.__name__ == builder and kind.__module__ == module for kind in builds.__mro__)

    def _count_empty_rows(stock: StockFunction, activity: Activity) -> StockFunction:
        given = activity.counter(event)

        @functools.wraps(stock)
        def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                kind: Any = type(self)
                if is_such_a_builder(kind):
                    last = common_attn_metadata.query_start_loc_cpu.numpy()[-2:]
                    if len(last) == 2 and last[0] == last[1]:
                        given.count += 1
            except Exception as error:
                activity.failed(error)
            return stock(self, common_prefix_len, common_attn_metadata, *args, **kwargs)

        return build

    return _count_empty_rows
