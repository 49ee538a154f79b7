"""What tests of the fused kernels share."""

import pytest

from hf_qmoe.ops import native_library, native_product


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused kernels that were used."""
    if not native_library.available():
        pytest.skip(str(native_library.why_not()))
    used: list[str] = []
    run = native_product._run

    def counted(name: str, *arguments: object) -> bool:
        used.append(name)
        return run(name, *arguments)

    monkeypatch.setattr(native_product, "_run", counted)
    return used
