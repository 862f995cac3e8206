"""Builds the compiled kernel if there is a compiler; without one the package installs all the same.

The library has a plain C interface: it depends neither on Python's nor on torch's. One source is compiled once for each
instruction set, and the best one that the processor runs is picked when the library is loaded.
"""

from __future__ import annotations

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("massieu/kernels/native")
COMMON = ["-std=gnu++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"]
BUILDS = {"portable": (16, [])}
if platform.machine() in ("x86_64", "AMD64"):
    BUILDS["avx2"] = (32, ["-mavx2", "-mfma"])
    wide = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
    BUILDS["avx512"] = (64, wide)


class BuildKernel(build_ext):
    """One object for each instruction set, linked into one library; a failure is reported and skipped."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, extension: Extension) -> None:
        for threads in (["-fopenmp"], ["-pthread"]):
            try:
                self.build_library(threads)
                return
            except Exception as error:  # whatever a missing or strange compiler raises, the install goes on
                reason = error
        self.warn(f"the compiled kernel was not built ({reason}); massieu will use its torch kernel")

    def build_library(self, threads: list[str]) -> None:
        folder = Path(self.build_temp)
        flags = [*COMMON, *threads]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = dict(zip(BUILDS, pool.map(lambda name: self.compile_build(name, flags), BUILDS), strict=True))
        here = {name: objects for name, objects in compiled.items() if objects}
        macros = [(f"MASSIEU_HAS_{name.upper()}", None) for name in here]
        objects = self.compile_one("dispatch.cpp", folder, macros, flags)
        objects += [one for own in here.values() for one in own]
        target = Path(self.get_ext_fullpath("massieu.kernels.libmassieu"))
        self.compiler.link_shared_object(objects, str(folder / target.name), extra_postargs=threads, target_lang="c++")
        # Copied beside its place and moved: whoever loads the library meanwhile sees the old one or the new one.
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / target.name, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)

    def compile_build(self, name: str, flags: list[str]) -> list[str]:
        """The objects of one instruction set; none if the compiler does not know it, except that one must work."""
        size, options = BUILDS[name]
        macros = [("MASSIEU_BUILD", name), ("MASSIEU_VECTOR_BYTES", str(size))]
        try:
            return self.compile_one("build.cpp", Path(self.build_temp) / name, macros, [*flags, *options])
        except Exception as error:
            if name == "portable":
                raise
            self.warn(f"the compiled kernel goes without {name} ({error})")
            return []

    def compile_one(self, source: str, folder: Path, macros: list, flags: list[str]) -> list[str]:
        return self.compiler.compile([str(NATIVE / source)], str(folder), macros, extra_postargs=flags)


sources = [str(path) for path in sorted(NATIVE.glob("*.cpp"))]
headers = [str(path) for path in sorted(NATIVE.glob("*.h"))]
setup(
    ext_modules=[Extension("massieu.kernels.libmassieu", sources, depends=headers, language="c++", optional=True)],
    cmdclass={"build_ext": BuildKernel},
)
