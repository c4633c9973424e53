# SPDX-License-Identifier: MIT OR Unlicense
# pip install --no-deps nemo-automodel==0.7.0 torchtune==0.6.1 litgpt==0.5.13 (and what their
# imports then name)
"""Losses of NeMo Automodel, torchtune and litgpt, as their recipes put steps together."""
from common import IGNORED, check_losses, loss_case, module_file

import torch
import torch.distributed as dist


def automodel(place, logits, labels):
    """The sum over own tokens, over the tokens of the step, x the ranks that average."""
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    tokens = sum(place["counts"])
    loss = MaskedCrossEntropy()(logits[None], labels[None], num_label_tokens=tokens)
    return loss * dist.get_world_size()


def torchtune(place, logits, labels):
    """The mean x own tokens; its recipes scale gradients by ranks / tokens afterwards."""
    file = module_file("torchtune", "torchtune/modules/loss/ce_chunked_output_loss.py")
    loss_of = file.CEWithChunkedOutputLoss(num_output_chunks=2)
    loss = loss_of([x[None] for x in logits.chunk(2)], labels[None])
    return loss * (labels != IGNORED).sum() * dist.get_world_size() / sum(place["counts"])


def litgpt(place, logits, labels):
    """The mean of a micro-batch, over their number."""
    from litgpt.utils import chunked_cross_entropy
    return chunked_cross_entropy(logits[None], labels[None]) / place["micro_batches"]


if __name__ == "__main__":
    rows = dict(prompts=(3, 12, 9, 5), sp=1)
    check_losses("nemo-automodel", [
        loss_case("MaskedCrossEntropy, cp 2", automodel),
        loss_case("MaskedCrossEntropy, cp 2, a rank without labels", automodel, prompts=(10,)),
        loss_case("MaskedCrossEntropy, 2 ranks x 2", automodel, **rows)])
    check_losses("torchtune", [
        loss_case("CEWithChunkedOutputLoss, 2 ranks x 2", torchtune, **rows)])
    check_losses("litgpt", [
        loss_case("fine-tuning, 2 ranks x 2", litgpt, **rows,
                  mark="its own rule: micro-batches weigh alike")])
