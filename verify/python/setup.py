# SPDX-License-Identifier: MIT OR Unlicense
"""The binary is built where the sources are, and goes into the package; it writes its manual page and what a shell
completes. SEQPAR_WHEEL=FOLDER: the binary is FOLDER/seqpar-verify, which ci/wheel.sh has made for another machine."""
import os
import pathlib
import platform
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
MADE = os.environ.get("SEQPAR_WHEEL") and pathlib.Path(os.environ["SEQPAR_WHEEL"])
ROOT = MADE.parents[2] if MADE else HERE.parents[1]
BUILD = MADE or ROOT / "build"
SHARE = {"man/man1/seqpar-verify.1": ["--man"],
         "bash-completion/completions/seqpar-verify": ["--completion", "bash"],
         "zsh/site-functions/_seqpar-verify": ["--completion", "zsh"]}


def share(path):
    """Where a file of share/ is made, as data_files wants it: from here on."""
    return os.path.relpath(BUILD / "share" / path, HERE)


def build():
    """build/seqpar-verify, by cc."""
    if not (ROOT / "seqpar.h").exists():
        raise SystemExit(f"{ROOT} is not the folder of seqpar; type: pip install ./verify/python, in a clone of it")
    missing = subprocess.run(["sh", str(ROOT / "ci" / "setup.sh")], env={**os.environ, "SETUP": "check"},
                             stderr=subprocess.PIPE, text=True)
    if missing.returncode:
        raise SystemExit(missing.stderr.strip())
    if subprocess.run(["make", "-C", str(ROOT), "build/seqpar-verify"]).returncode:
        raise SystemExit("seqpar-verify was not built; the compiler says why, above")


class BuildBinary(build_py):
    def run(self):
        if not MADE:
            build()
        super().run()
        package = pathlib.Path(self.build_lib) / "seqpar_verify"
        shutil.copy2(BUILD / "seqpar-verify", package / "seqpar-verify")
        if MADE:  # what is linked into the binary has licences of its own
            shutil.copytree(MADE.parent / "licenses", package / "licenses", dirs_exist_ok=True)
        speaks = MADE.parent / platform.machine() / "seqpar-verify" if MADE else BUILD / "seqpar-verify"
        for path, words in SHARE.items():
            made = BUILD / "share" / path
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_bytes(subprocess.run([str(speaks), *words], check=True, stdout=subprocess.PIPE).stdout)


class OfThisMachine(Distribution):
    """A wheel with a binary in it."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildBinary}, distclass=OfThisMachine,
      data_files=[("share/" + os.path.dirname(path), [share(path)]) for path in SHARE])
