# SPDX-License-Identifier: MIT OR Unlicense
"""A fixture for pytest: a folder for dumps, and the verdict on them.

    def test_two_ranks(seqpar):
        run_two_ranks(dump_to=seqpar.folder)
        seqpar.expect_right(model=seqpar.folder / "model", strict=True)

What passes without its gradients judged stands among pytest's warnings. `pytest --seqpar-require gradients,norm`: no expect_right of
the fixture passes where one of these stages, or of those of its own require=, was not judged.
"""
import pytest

import seqpar_verify


def pytest_addoption(parser):
    parser.getgroup("seqpar").addoption("--seqpar-require", metavar="STAGES", default="",
                                        help="stages that every expect_right of the fixture seqpar requires, as gradients,norm")


def _stages(require):
    """As a list, whichever way the caller wrote it."""
    return list(require) if isinstance(require, (list, tuple)) else str(require).split(",") if require else []


class Seqpar:
    def __init__(self, folder, require=()):
        self.folder, self.require = folder, require

    def ver(self, **options):
        return seqpar_verify.ver(self.folder, **options)

    def expect_right(self, require=None, **options):
        stages = list(dict.fromkeys([*_stages(require), *_stages(self.require)]))
        return seqpar_verify.expect_right(self.folder, require=stages or None, **options)


@pytest.fixture
def seqpar(tmp_path, request):
    return Seqpar(tmp_path / "dump", request.config.getoption("--seqpar-require"))
