# SPDX-License-Identifier: MIT OR Unlicense
"""A fixture for pytest: a folder for dumps, and the verdict on them.

    def test_two_ranks(seqpar):
        run_two_ranks(dump_to=seqpar.folder)
        seqpar.expect_right(model=seqpar.folder / "model", strict=True)

What passes without its gradients judged stands among pytest's warnings.
"""
import pytest

import seqpar_verify


class Seqpar:
    def __init__(self, folder):
        self.folder = folder

    def ver(self, **options):
        return seqpar_verify.ver(self.folder, **options)

    def expect_right(self, **options):
        return seqpar_verify.expect_right(self.folder, **options)


@pytest.fixture
def seqpar(tmp_path):
    return Seqpar(tmp_path / "dump")
