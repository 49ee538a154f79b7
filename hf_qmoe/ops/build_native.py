"""Compiles the CPU kernels in ``csrc``: ``python -m hf_qmoe.ops.build_native``, with ``--help`` for more.

The library lands beside this file, for installs of every kind: the build hook of the package, the Makefile and the
command line all come here. This file needs the standard library only, since the hook runs before anything else is
installed. Each instruction set is a file compiled with its own flags; which of them runs is decided at run time.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


_HERE = Path(__file__).resolve().parent
SOURCES = _HERE / "csrc"

#: The library, and the ones built with ``--sanitize`` and ``--emulate-amx``. None is under version control.
LIBRARY = _HERE / "_native.so"
SANITIZED_LIBRARY = _HERE / "_native_sanitize.so"
EMULATED_LIBRARY = _HERE / "_native_amx_emulated.so"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi")
# By the end of a source file's name. Files with another end are compiled for any processor.
_AVX512BF16 = (*_AVX512, "-mavx512bf16")
_AMX = ("-mamx-tile", "-mamx-bf16")
_X86_FLAGS = {"avx2": _AVX2, "avx512": _AVX512, "avx512bf16": _AVX512BF16, "amx": (*_AVX512BF16, *_AMX)}
# Results are to be the same for every instruction set: a product and a sum are fused where the source says so only.
_FLAGS = (
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-ffp-contract=off"),
    # GCC 12 warns about its own intrinsics headers.
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
#: Run at a time; each takes a few hundred megabytes.
_MOST_COMPILERS = 4
_OPTIMIZE = ("-O3",)
_EMULATE = ("-O1",)  # compiling takes longer than the tests
_SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why."""


def source_digest() -> str:
    """Identifies the sources and flags of a library, and its kind of machine, so that another one is not used."""
    digest = hashlib.sha256(repr((_FLAGS, _X86_FLAGS, platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()) if SOURCES.is_dir() else ():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: ``$CXX``, else ``g++``, ``clang++`` or ``c++``; `None` if there is none."""
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


def build(sanitize: bool = False, output: Path | None = None, emulate_amx: bool = False) -> Path:
    """Compiles and links the library.

    Args:
        sanitize: with address and undefined behaviour checks, slow, for the tests.
        output: where to; by default `LIBRARY`, `SANITIZED_LIBRARY` or, whether sanitized or not, `EMULATED_LIBRARY`.
            A library there is replaced only on success.
        emulate_amx: for the tests: AMX instructions computed in C++, on any processor with AVX512-BF16.

    Returns:
        The path of the library.

    Raises:
        BuildError: no compiler, or it failed.
    """
    if sys.platform == "win32":
        raise BuildError("the CPU kernels are not built on Windows")
    compiler = find_compiler()
    if compiler is None and os.environ.get("CXX"):
        raise BuildError(f"CXX={os.environ['CXX']} is not a command; unset it to try g++, clang++ and c++")
    if compiler is None:
        raise BuildError("no C++ compiler found: g++, clang++ or c++")
    target = output or (EMULATED_LIBRARY if emulate_amx else SANITIZED_LIBRARY if sanitize else LIBRARY)
    mode = _SANITIZE if sanitize else _EMULATE if emulate_amx else _OPTIMIZE
    flags, defines = dict(_X86_FLAGS), [f'-DHF_QMOE_SOURCE_DIGEST="{source_digest()}"']
    if emulate_amx:
        flags["amx"] = _AVX512BF16
        defines.append("-DHF_QMOE_EMULATE_AMX")
    elif not _takes(compiler, _AMX):
        del flags["amx"]
        defines.append("-DHF_QMOE_NO_AMX")
    units = _units(flags)
    try:
        _compile([*compiler, *mode, "-fopenmp"], units, defines, target)
    except BuildError:
        # clang often comes without OpenMP; the kernels then use one thread
        _compile([*compiler, *mode], units, defines, target)
    return target


def build_if_needed() -> Path:
    """`LIBRARY`, compiled unless it was from these sources: installing again, with other extras, is quick.

    With ``$CXX`` it is compiled in any case, by that compiler.

    Raises:
        BuildError: see `build`.
    """
    is_current = LIBRARY.is_file() and source_digest().encode() in LIBRARY.read_bytes()
    return LIBRARY if is_current and not os.environ.get("CXX") else build()


def _takes(compiler: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether the compiler knows these flags: GCC before 11 has no AMX."""
    try:
        _run([*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def _units(x86_flags: Mapping[str, tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """Source files and their own flags; those of an instruction set without flags are left out."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    units: list[tuple[str, tuple[str, ...]]] = []
    for name in sorted(path.stem for path in SOURCES.glob("*.cpp")):
        instruction_set = name.rpartition("_")[2]
        if instruction_set not in _X86_FLAGS:
            units.append((name, ()))
        elif is_x86 and instruction_set in x86_flags:
            units.append((name, x86_flags[instruction_set]))
    return units


def _compile(
    command: list[str], units: list[tuple[str, tuple[str, ...]]], defines: Sequence[str], target: Path
) -> None:
    # Linked beside its destination and moved over it: a process that has the old library open keeps it.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-build-") as folder:
        objects, commands = [], []
        # Those that take longest first, so that none of them is left at the end.
        for name, flags in sorted(units, key=lambda unit: not unit[0].startswith("experts_")):
            objects.append(f"{folder}/{name}.o")
            source = str(SOURCES / f"{name}.cpp")
            commands.append([*command, *_FLAGS, *defines, *flags, "-c", source, "-o", objects[-1]])
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_COMPILERS)) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / target.name
        _run([*command, "-shared", *objects, "-o", str(linked)])
        os.replace(linked, target)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        what = next((Path(word).name for word in command if word.endswith(".cpp")), "the library")
        raise BuildError(f"{command[0]} failed on {what}: {errors[0].strip() if errors else done.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds in place; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_qmoe.ops.build_native", description="Compiles the CPU kernels."
    )
    parser.add_argument("--sanitize", action="store_true", help=f"build {SANITIZED_LIBRARY.name} with checks")
    parser.add_argument("--emulate-amx", action="store_true", help=f"build {EMULATED_LIBRARY.name}, for the tests")
    parser.add_argument("--if-needed", action="store_true", help=f"not if {LIBRARY.name} is of these sources")
    options = parser.parse_args(arguments)
    if options.if_needed and (options.sanitize or options.emulate_amx):
        parser.error("--if-needed is for the library without checks and emulation")
    try:
        library = build_if_needed() if options.if_needed else build(options.sanitize, emulate_amx=options.emulate_amx)
    except BuildError as error:
        print(f"hf_qmoe: CPU kernels not built: {error}", file=sys.stderr)
        return 1
    print(f"built {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
