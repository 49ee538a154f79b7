"""The README's claims that can be run: its code, its table, its length."""

import re
from pathlib import Path

import pytest

from tests.support.models import save_tiny


README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks run as they stand, with a tiny checkpoint in the place of the one they download."""
    save_tiny(tmp_path / "tiny", "olmoe")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block.replace("allenai/OLMoE-1B-7B-0924", "tiny"), str(README), "exec"), namespace)
    assert float(namespace["loss"]) > 0
    assert not hasattr(namespace["model"].config, "quantization_config")


def test_weights_table_is_what_the_script_prints() -> None:
    """The table of bytes is the output of `benchmarks/weights_table.py`."""
    from benchmarks.weights_table import table

    assert table() in README.read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    """At most 200 lines."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200
