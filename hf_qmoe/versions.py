"""Refusing to run on packages that are too old, before anything else is imported."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


#: Oldest versions that work. transformers before 5.23 casts a checkpoint tensor to the dtype of its packed
#: placeholder before it is quantized: silent garbage.
MINIMUM = {"transformers": "5.23.0", "bitsandbytes": "0.48.0", "torch": "2.8.0"}


def check_versions() -> None:
    """Raises `ImportError` naming a package that is missing or too old, and what to install."""
    for package, minimum in MINIMUM.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = None
        if found is None or Version(found) < Version(minimum):
            raise ImportError(
                f"hf_qmoe needs {package}>={minimum}, found {found or 'none'}; "
                f"run: pip install -U '{package}>={minimum}'"
            )
