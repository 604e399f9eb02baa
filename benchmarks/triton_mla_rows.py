"""What zeros in rows without tokens cost in the graphs of Triton's MLA decode, on a GPU.

    PYTHONPATH=SITE python benchmarks/triton_mla_rows.py [--out FILE]
    PYTHONPATH=RELEASE python benchmarks/triton_mla_rows.py --rehearse

One graph holds the decode of 60 layers, four times: with stock's launch, with it once more, with a fill of the empty
rows after each layer (what `triton-mla-padding` does where its kernel cannot be compiled), and with the fix. They are
replayed in turns, full and with half of the rows empty; a ratio is of neighbours in time. What they leave is compared:
rows with tokens are stock's bit for bit, empty ones zeros. The rest of a decode step is left out, so a share of this is
less of a step. --rehearse runs the same on the CPU double, with sizes that mean nothing. Exit code 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measuring import PROJECT, console, table

sys.path.append(str(PROJECT))

PAGE, SPLITS = 64, 8
STOCK, AGAIN, FILLED, FIXED = "stock", "stock again", "filled afterwards", "the fix"


class Sizes(NamedTuple):
    layers: int = 60
    heads: int = 128
    latent: int = 512
    rope: int = 64
    tokens: int = 1024
    rows: tuple[int, ...] = (1, 64, 256)
    device: str = "cuda"


REHEARSED = Sizes(2, 2, 8, 4, 100, (1, 4), "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="of replays of each graph (default: 30)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there, as JSON")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU double")
    options = parser.parse_args()
    import torch

    sizes = REHEARSED if options.rehearse else Sizes()
    batches = [(rows, empty) for rows in sizes.rows for empty in dict.fromkeys((0, rows // 2))]
    with rehearsal() if options.rehearse else contextlib.nullcontext():
        results = [Batch(sizes, *batch).measure(options.rounds) for batch in batches]
    name = "CPU double, rehearsal" if options.rehearse else torch.cuda.get_device_name()
    result = {"device": name, "torch": torch.__version__, "sizes": sizes._asdict(), "batches": results}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    show(result)
    return 0 if all(each["right"] for each in results) else 1


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
    from vllm_graphfix.verify.double.scenarios.triton_mla_padding import cpu_triton_mla

    with cpu_triton_mla(), cpu_cuda_graphs():
        yield


def launches() -> dict[str, Callable[..., Any]]:
    """Stock's launch of the second stage, and what takes its place."""
    from vllm.v1.attention.ops import triton_decode_attention as kernels

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.triton_mla_padding import FIX

    stock = kernels._decode_softmax_reducev_fwd
    stock = getattr(stock, "__wrapped__", stock)

    def filled(logits: Any, q: Any, o: Any, lse: Any, v_buffer: Any, b_seq_len: Any, num_kv_splits: Any) -> None:
        stock(logits, q, o, lse, v_buffer, b_seq_len, num_kv_splits)
        o.masked_fill_((b_seq_len < 1).view(o.shape[0], 1, 1), 0.0)

    zeros, _ = FIX.patches("divides-by-nothing")
    return {STOCK: stock, AGAIN: stock, FILLED: filled, FIXED: zeros.wrap(stock, Activity(FIX.events))}


class Batch:
    """One batch, the last *empty* of whose *rows* have no tokens, and its graphs."""

    def __init__(self, sizes: Sizes, rows: int, empty: int) -> None:
        import torch

        torch.manual_seed(0)
        self._sizes, self._rows, self._empty = sizes, rows, empty
        made: dict[str, Any] = {
            "device": sizes.device,
            "dtype": torch.float32 if sizes.device == "cpu" else torch.bfloat16,
        }
        pages = -(-sizes.tokens // PAGE)
        width = sizes.latent + sizes.rope
        self._query = torch.randn(rows, sizes.heads, width, **made)
        self._cache = torch.randn(1 + rows * pages, PAGE, 1, width, **made)
        self._tables = torch.arange(1, 1 + rows * pages, dtype=torch.int32, device=sizes.device).view(rows, pages)
        self._lengths = torch.randint(sizes.tokens // 2, sizes.tokens + 1, (rows,), dtype=torch.int32).to(sizes.device)
        self._logits = torch.zeros(rows, sizes.heads, SPLITS, sizes.latent + 1, device=sizes.device)
        self._scale = torch.ones((), device=sizes.device)
        self._made = made

    def measure(self, rounds: int) -> dict[str, Any]:
        graphs = {name: self._captured(launch) for name, launch in launches().items()}
        if self._empty:  # only now, as a batch that is padded to a graph that was captured full
            self._lengths[-self._empty :] = 0
        left = {name: self._left_by(graph, *outputs) for name, (graph, *outputs) in graphs.items()}
        taken: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(rounds):
            for name in list(graphs) if number % 2 else reversed(graphs):
                taken[name].append(self._milliseconds(graphs[name][0]))
        ratios = {name: [a / b for a, b in zip(taken[name], taken[STOCK], strict=True)] for name in taken}
        return {
            "rows": self._rows,
            "empty": self._empty,
            "ms": {name: statistics.median(values) for name, values in taken.items()},
            "ratio": {name: (statistics.median(v), min(v), max(v)) for name, v in ratios.items()},
            "right": self._right(left),
            "stock_nan": bool(left[STOCK][0][self._rows - self._empty :].isnan().any()),
        }

    def _captured(self, launch: Callable[..., Any]) -> tuple[Any, Any, Any]:
        """A graph of all layers, and the output and log-sum-exp of the last one."""
        import torch
        from vllm.v1.attention.ops import triton_decode_attention as kernels

        stock = kernels._decode_softmax_reducev_fwd
        kernels._decode_softmax_reducev_fwd = launch
        try:
            self._layer()  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(self._sizes.layers):
                    output, log_sums = self._layer()
        finally:
            kernels._decode_softmax_reducev_fwd = stock
        return graph, output, log_sums

    def _layer(self) -> tuple[Any, Any]:
        """As the backend calls the kernel."""
        import torch
        from vllm.v1.attention.ops import triton_decode_attention as kernels

        output = torch.zeros(self._rows, self._sizes.heads, self._sizes.latent, **self._made)
        log_sums = torch.zeros(self._rows, self._sizes.heads, **self._made)
        kernels.decode_attention_fwd(
            self._query,
            self._cache,
            self._cache[..., : self._sizes.latent],
            output,
            log_sums,
            self._tables,
            self._lengths,
            self._logits,
            SPLITS,
            (self._sizes.latent + self._sizes.rope) ** -0.5,
            PAGE,
            k_scale=self._scale,
            v_scale=self._scale,
            is_mla=True,
        )
        return output, log_sums

    def _left_by(self, graph: Any, output: Any, log_sums: Any) -> tuple[Any, Any]:
        graph.replay()
        return output.clone(), log_sums.clone()

    def _milliseconds(self, graph: Any) -> float:
        import torch

        if self._sizes.device == "cpu":
            began = time.perf_counter()
            graph.replay()
            return (time.perf_counter() - began) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # not the first after another graph
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _right(self, left: dict[str, tuple[Any, Any]]) -> bool:
        import torch

        real = self._rows - self._empty
        (expected, sums), (output, log_sums) = left[STOCK], left[FIXED]
        return (
            torch.equal(output[:real], expected[:real])
            and torch.equal(log_sums, sums)
            and bool((output[real:] == 0).all())
            and bool((log_sums[real:] == float("-inf")).all())
        )


def show(result: dict[str, Any]) -> None:
    sizes = result["sizes"]
    made = table(
        f"{sizes['layers']} layers of {sizes['heads']} heads in one graph; {result['device']}, torch {result['torch']}",
        *("rows", "empty", "stock, ms", *(f"{name} / stock" for name in (AGAIN, FILLED, FIXED))),
        *("the fix adds, µs", "rows are right", "stock leaves NaN"),
    )
    for each in result["batches"]:
        ratios = ("{:.4f} ({:.4f} – {:.4f})".format(*each["ratio"][name]) for name in (AGAIN, FILLED, FIXED))
        added = (each["ms"][FIXED] - each["ms"][STOCK]) * 1e3
        answers = ("yes" if each[key] else "no" for key in ("right", "stock_nan"))
        made.add_row(
            str(each["rows"]), str(each["empty"]), f"{each['ms'][STOCK]:.3f}", *ratios, f"{added:+.1f}", *answers
        )
    console().print(made)


if __name__ == "__main__":
    sys.exit(main())
