"""Draws the recorded rows: `python benchmarks/plots.py [CASE ...]` writes ``benchmarks/results/plots/<case>.svg``.

Nothing is measured here; a plot shows the newest run (`benchmarks.results.current`). The files are the
same each time they are drawn from the same rows.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path


_ROOT = str(Path(__file__).resolve().parents[1])
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = _ROOT  # modules here are to be found as `benchmarks.*` only

import matplotlib  # noqa: E402
from matplotlib.artist import Artist  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: E402

from benchmarks import results  # noqa: E402
from benchmarks.case import Row  # noqa: E402


#: Ours stand out; the baseline is black; the others keep their colour from plot to plot.
COLORS = {
    "hf_qmoe": "#f58518",
    "hf_qmoe_exact": "#e45756",
    "hf_qmoe_and_linears": "#eeca3b",
    "parametrized": "#eeca3b",
    "bf16_grouped_mm": "#222222",
    "stock_peft": "#222222",
    "plain": "#9d755d",
    "bf16_eager": "#888888",
    "bf16_batched_mm": "#bbbbbb",
    "whole_stack": "#4c78a8",
    "bitsandbytes": "#4c78a8",
    "experts4bit_qlora": "#54a24b",
    "llama_cpp": "#b279a2",
}
_OTHERS = "#72b7b2"
_NAMES = {"T": "tokens", "E": "experts in the layer", "depth": "layers", "rank": "LoRA rank"}


def _arms(rows: Iterable[Row]) -> list[str]:
    """In the order of `COLORS`, so that legends agree."""
    found = dict.fromkeys(row.arm for row in rows)
    known = [arm for arm in COLORS if arm in found]
    return known + [arm for arm in found if arm not in COLORS]


def _lines(axes: Axes, rows: Sequence[Row], x: str, y: Callable[[Row], float | None]) -> None:
    """A line for each arm over ``config[x]``, both axes logarithmic."""
    for arm in _arms(rows):
        points = sorted((row.config[x], value) for row in rows if row.arm == arm and (value := y(row)) is not None)
        ours, color = arm.startswith("hf_qmoe"), COLORS.get(arm, _OTHERS)
        (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=arm, color=color)
        line.set(linewidth=2.5 if ours else 1.3, zorder=3 if ours else 2)
    ticks = sorted({row.config[x] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel=_NAMES.get(x, x))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure) -> None:
    """One for all panels."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(4, len(named)), frameon=False)


def _title(config: Mapping[str, int]) -> str:
    names = {64: "OLMoE", 128: "Qwen3-30B-A3B"}
    sizes = ", ".join(f"{key}={config[key]}" for key in ("E", "H", "I", "top_k"))
    return f"{names[config['E']]} ({sizes})" if config["H"] == 2048 and config["E"] in names else sizes


def _layers(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by the layer they were measured on."""
    by_layer: dict[str, list[Row]] = {}
    for row in rows:
        if "E" in row.config:
            by_layer.setdefault(_title(row.config), []).append(row)
    return by_layer


def _grid(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(4.8 * columns, 3.6 * rows + 0.8), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def experts_time(rows: Sequence[Row]) -> Figure:
    """Time relative to bf16 `grouped_mm` over tokens; a triangle is a target."""
    modes = ("forward", "forward_backward")
    by_layer = _layers(row for row in rows if row.baseline == "bf16_grouped_mm")
    figure, panels = _grid(len(by_layer), len(modes))
    for line, (title, measured) in zip(panels, by_layer.items(), strict=True):
        for axes, mode in zip(line, modes, strict=True):
            shown = [row for row in measured if row.metric == mode]
            _lines(axes, shown, "T", lambda row: row.ratio)
            targets = {row.config["T"]: row.target for row in shown if row.target is not None}
            axes.scatter(
                list(targets), list(targets.values()), marker="v", color="#f58518", edgecolors="white", s=60, zorder=4
            )
            axes.set(title=f"{title}\n{mode.replace('_', ' and ')}", ylabel="time / bf16 grouped_mm")
    _legend(figure)
    return figure


def growth(rows: Sequence[Row]) -> Figure:
    """Time, and memory in use at the peak, along each axis."""
    names = list(dict.fromkeys(row.config["axis"] for row in rows))
    figure, panels = _grid(2, len(names))
    for column, name in enumerate(names):
        along = [row for row in rows if row.config["axis"] == name]
        times, memory = panels[0][column], panels[1][column]
        _lines(times, [row for row in along if row.unit == "ms"], name, lambda row: row.value)
        weights = {(row.arm, row.config[name]): row.value for row in along if row.metric == "weights"}
        peaks = [row for row in along if row.metric == "peak_tensors"]

        def in_use(row: Row, name: str = name, weights: Mapping[tuple[str, int], float] = weights) -> float:
            return (row.value + weights[row.arm, row.config[name]]) / 1e6

        _lines(memory, peaks, name, in_use)
        times.set(ylabel="forward and backward, ms", title=f"by {_NAMES[name]}")
        memory.set(ylabel="weights and peak of tensors, MB")
    _legend(figure)
    return figure


def training_memory(rows: Sequence[Row]) -> Figure:
    """Peak of a step over depth, by the kernel's and by torch's count."""
    metrics = {"peak_rss_anon": "RssAnon", "peak_tensors": "live tensors"}
    figure, panels = _grid(1, len(metrics))
    for axes, (metric, name) in zip(panels[0], metrics.items(), strict=True):
        _lines(axes, [row for row in rows if row.metric == metric], "depth", lambda row: row.value / 1e6)
        axes.set(title=f"Peak of a training step, {name}", ylabel="MB")
    _legend(figure)
    return figure


def expert_lora(rows: Sequence[Row]) -> Figure:
    """Time and memory of a LoRA step relative to stock PEFT's."""
    metrics = {"step": "time", "peak_rss_anon": "peak RssAnon", "peak_tensors": "peak of live tensors"}
    by_layer = _layers(rows)
    figure, panels = _grid(len(by_layer), len(metrics))
    for line, (title, measured) in zip(panels, by_layer.items(), strict=True):
        for axes, (metric, name) in zip(line, metrics.items(), strict=True):
            _lines(axes, [row for row in measured if row.metric == metric], "T", lambda row: row.ratio)
            axes.set(title=f"{title}\nLoRA step, {name}", ylabel="relative to stock PEFT")
    _legend(figure)
    return figure


def _bars(rows: Sequence[Row], label: str, title: str, scale: float = 1.0) -> Figure:
    arms = _arms(rows)
    values = [next(row.value for row in rows if row.arm == arm) * scale for arm in arms]
    figure = Figure(figsize=(7, 0.5 * len(arms) + 1.4), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(arms, values, color=[COLORS.get(arm, _OTHERS) for arm in arms])
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
    axes.invert_yaxis()
    axes.set(xlabel=label, title=title, xlim=(0, 1.12 * max(values)))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def decode(rows: Sequence[Row]) -> Figure:
    """Tokens per second of each arm."""
    rates = [row for row in rows if row.metric == "rate"]
    return _bars(rates, "tokens per second", "Greedy decoding, SmolLM2-135M as a Mixtral of 4 experts")


def quantize_disk(rows: Sequence[Row]) -> Figure:
    """Seconds of each arm."""
    return _bars(rows, "seconds", "bf16 checkpoint to nf4 checkpoint, the demo's model", 1e-3)


PLOTS: Mapping[str, Callable[[Sequence[Row]], Figure]] = {
    "experts_time": experts_time,
    "growth": growth,
    "training_memory": training_memory,
    "expert_lora": expert_lora,
    "decode": decode,
    "quantize_disk": quantize_disk,
}


def draw(case: str, path: Path, out: Path) -> Path:
    """Draws the rows in the results file `path` to ``out/<case>.svg``."""
    figure = PLOTS[case]([row for row, _ in results.current(path)])
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{case}.svg"
    with matplotlib.rc_context({"svg.hashsalt": case}):  # otherwise ids in the file are random
        figure.savefig(target, metadata={"Date": None})
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws what is recorded and has a plot."""
    parser = argparse.ArgumentParser(description="Draws recorded benchmark rows.")
    parser.add_argument("cases", nargs="*", metavar="CASE", choices=[*PLOTS, []], help="all that are recorded if none")
    parser.add_argument("--results", type=Path, default=results.DIRECTORY, help="directory of the results files")
    parser.add_argument("--out", type=Path, help="where to draw to; `plots` beside the results files if not given")
    parsed = parser.parse_args(arguments)
    for path in results.files(parsed.results, parsed.cases):
        if path.stem in PLOTS:
            print(draw(path.stem, path, parsed.out or parsed.results / "plots").name)
    missing = [case for case in PLOTS if not (parsed.results / f"{case}.csv").exists()]
    if missing and not parsed.cases:
        print(f"not drawn, for nothing is recorded of them: {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
