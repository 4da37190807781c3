"""Cut-offs of the adaptive input and softmax against each other and against the vocabulary."""

import pytest

from megatron_allattn.config import ModelConfig, UsageError, check_vocabulary


@pytest.mark.parametrize("cutoffs", ["50,50", "0", "0,20", "50,20", "20,,50", "20,x", "-3", "2.5"])
def test_cutoffs_that_make_no_clusters_are_refused(cutoffs: str) -> None:
    with pytest.raises(UsageError, match=rf"^--adaptive-cutoffs {cutoffs}: .*; give ascending numbers such as"):
        ModelConfig(adaptive_cutoffs=cutoffs)


@pytest.mark.parametrize("cutoffs", ["20,200", "100", "101", "20,100"])
def test_cutoffs_at_or_above_the_vocabulary_are_refused(cutoffs: str) -> None:
    message = rf"^--adaptive-cutoffs {cutoffs}: each must be below the vocabulary size 100, .*; give cut-offs up to 99"
    with pytest.raises(UsageError, match=message):
        check_vocabulary(ModelConfig(adaptive_cutoffs=cutoffs), 100)


@pytest.mark.parametrize("cutoffs", [None, "99", "1", "20,99", "1,2,3"])
def test_other_cutoffs_are_accepted(cutoffs: str | None) -> None:
    check_vocabulary(ModelConfig(adaptive_cutoffs=cutoffs), 100)
