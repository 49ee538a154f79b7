"""The command line of an export: what it prints, and how it fails."""

from pathlib import Path

import pytest

from hf_qmoe import QMoEConfig
from hf_qmoe.cli import main
from hf_qmoe.export import checkpoint as module
from tests.support.checkpoints import digest, tensors_on_disk
from tests.support.exporting import save_packed


LAYOUT = ["--layout", "bnb-per-expert"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed checkpoint with something to note: its experts' scales alone are double-quantized."""
    config = QMoEConfig(experts_double_quant=True)
    return save_packed(tmp_path_factory.mktemp("export"), "qwen3_moe", config).packed


def test_says_what_it_did(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    capsys.readouterr()

    assert main(["export", str(packed), str(out), *LAYOUT]) == 0

    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    output = capsys.readouterr()
    assert output.out == (
        f"exported 24 weights of experts among {len(tensors_on_disk(out))} tensors; wrote {size / 1024:.1f} KiB to "
        f"{out}\n"
    )
    progress, note = output.err.splitlines()
    assert progress == "[1/1] model.safetensors"
    assert note.startswith("note: double-quantized scales are written as the fp32 values they stand for")


def test_quiet_and_overwrite(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(packed), str(tmp_path / "out"), *LAYOUT, "--quiet"]
    assert main(arguments) == 0
    expected = digest(tmp_path)
    capsys.readouterr()
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert (
        output.err == f"hf-qmoe export: error: {tmp_path / 'out'} exists and is not empty (--overwrite replaces it)\n"
    )
    assert main([*arguments, "--overwrite"]) == 0
    assert capsys.readouterr().err == ""
    assert digest(tmp_path) == expected


def test_mistakes_are_one_line(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (packed.parent / "float", tmp_path / "nowhere", tmp_path):
        assert main(["export", str(source), str(tmp_path / "out"), *LAYOUT]) == 1
        output = capsys.readouterr()
        assert output.err.startswith("hf-qmoe export: error: ")
        assert output.err.count("\n") == 1
        assert output.out == ""
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_a_bug_is_not(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise failure

    monkeypatch.setattr(module, "write_shard", fail)
    arguments = ["export", str(packed), str(tmp_path / "out"), *LAYOUT, "--quiet"]
    failure: Exception = OSError(28, "No space left on device")
    capsys.readouterr()
    assert main(arguments) == 1
    assert capsys.readouterr().err == "hf-qmoe export: error: [Errno 28] No space left on device\n"
    failure = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        main(arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", *LAYOUT], ["a", "b", "--layout", "gguf"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", *arguments])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: hf-qmoe")
