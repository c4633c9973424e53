# SPDX-License-Identifier: MIT OR Unlicense
"""The binary is built where the sources are, and goes into the package; it writes its manual page and what a shell
completes."""
import os
import pathlib
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARE = {"man/man1/seqpar-verify.1": ["--man"],
         "bash-completion/completions/seqpar-verify": ["--completion", "bash"],
         "zsh/site-functions/_seqpar-verify": ["--completion", "zsh"]}


def share(path):
    """Where a file of share/ is made, as data_files wants it: from here on."""
    return os.path.relpath(ROOT / "build" / "share" / path, pathlib.Path(__file__).resolve().parent)


class BuildBinary(build_py):
    def run(self):
        if not (ROOT / "seqpar.h").exists():
            raise SystemExit(f"{ROOT} is not the folder of seqpar; type: pip install ./verify/python, in a clone of it")
        missing = subprocess.run(["sh", str(ROOT / "ci" / "setup.sh")], env={**os.environ, "SETUP": "check"},
                                 stderr=subprocess.PIPE, text=True)
        if missing.returncode:
            raise SystemExit(missing.stderr.strip())
        super().run()
        if subprocess.run(["make", "-C", str(ROOT), "build/seqpar-verify"]).returncode:
            raise SystemExit("seqpar-verify was not built; the compiler says why, above")
        binary = ROOT / "build" / "seqpar-verify"
        shutil.copy2(binary, pathlib.Path(self.build_lib) / "seqpar_verify" / "seqpar-verify")
        for path, words in SHARE.items():
            made = ROOT / "build" / "share" / path
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_bytes(subprocess.run([str(binary), *words], check=True, stdout=subprocess.PIPE).stdout)


class OfThisMachine(Distribution):
    """A wheel with a binary in it."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildBinary}, distclass=OfThisMachine,
      data_files=[("share/" + os.path.dirname(path), [share(path)]) for path in SHARE])
