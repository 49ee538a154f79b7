"""Build hook: compiles the CPU kernels into the package, if there is a compiler.

Without one, or if compiling fails, the package is built without them and works with bitsandbytes' own kernels.
``HF_QMOE_REQUIRE_NATIVE=1`` makes that an error.
"""

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class NativeKernels(BuildHookInterface):
    """For wheels and editable installs; an sdist holds the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the library, built in place if it is not there, to the wheel, which then is for this platform only."""
        if self.target_name != "wheel":
            return
        # By path: the package itself cannot be imported, its dependencies are not there while it is being built.
        builder = runpy.run_path(str(Path(self.root, "hf_qmoe", "ops", "build_native.py")))
        try:
            library = builder["build_if_needed"]()
        except builder["BuildError"] as error:
            if os.environ.get("HF_QMOE_REQUIRE_NATIVE", "0") not in ("", "0"):
                raise
            self.app.display_warning(f"hf_qmoe: built without native CPU kernels: {error}")
            return
        build_data["artifacts"].append(f"/{library.relative_to(Path(self.root).resolve()).as_posix()}")
        build_data["pure_python"] = False
        # Any Python will do: the library is loaded with ctypes.
        build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    """This platform, without a claim about older ones as manylinux makes."""
    return next(tag.platform for tag in sys_tags() if "manylinux" not in tag.platform and "musl" not in tag.platform)
