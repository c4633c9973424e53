# SPDX-License-Identifier: MIT OR Unlicense
"""The binary is built where the sources are, and goes into the package."""
import pathlib
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parents[2]


class BuildBinary(build_py):
    def run(self):
        super().run()
        if not (ROOT / "seqpar.h").exists():
            raise SystemExit(f"{ROOT} is not the folder of seqpar; type: pip install ./verify/python, in a clone of it")
        subprocess.run(["make", "-C", str(ROOT), "build/seqpar-verify"], check=True)
        shutil.copy2(ROOT / "build" / "seqpar-verify", pathlib.Path(self.build_lib) / "seqpar_verify" / "seqpar-verify")


class OfThisMachine(Distribution):
    """A wheel with a binary in it."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildBinary}, distclass=OfThisMachine)
