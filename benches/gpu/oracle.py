"""What transformers computes in fp32 on a few texts, for `gpu check`: python oracle.py DIRECTORY...

Writes `oracle.safetensors` into each model directory: `ids` and `types` [T], `cu_seqlens` [B + 1], `mean` and `cls` [B, h]
of the last hidden states. Texts run one by one, so that nothing is padded or masked. Needs torch and transformers; runs on
the GPU where torch has one.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from checkpoints import POSITIONS, SEED, write_safetensors

# Both attention kernels, tiles that are full and that are not, and the longest text.
LENGTHS = [1, 2, 5, 16, 17, 31, 64, 65, 100, 127, 128, 129, 200, 257, POSITIONS]


def load(directory):
    model, report = transformers.BertModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # Numbers that a checkpoint lacks would be random, and the comparison would say nothing.
    if report["missing_keys"] or report["unexpected_keys"]:
        sys.exit(f"{directory}: {report}")
    return model.eval()


@torch.inference_mode()
def write(directory, device):
    model = load(directory).to(device)
    random = np.random.default_rng(SEED)
    ids = [random.integers(0, model.config.vocab_size, length, np.int32) for length in LENGTHS]
    types = [(np.arange(length) >= length // 2).astype(np.int32) for length in LENGTHS]
    mean, cls = [], []
    for row, kinds in zip(ids, types):
        inputs = [torch.from_numpy(array).long().unsqueeze(0).to(device) for array in (row, kinds)]
        states = model(input_ids=inputs[0], token_type_ids=inputs[1]).last_hidden_state[0]
        mean.append(states.mean(0).cpu().numpy())
        cls.append(states[0].cpu().numpy())
    ends = np.cumsum([0, *LENGTHS], dtype=np.int32)
    arrays = [("ids", np.concatenate(ids)), ("types", np.concatenate(types)), ("cu_seqlens", ends)]
    write_safetensors(directory / "oracle.safetensors", [*arrays, ("mean", np.stack(mean)), ("cls", np.stack(cls))])
    print(f"{directory.name}: {len(LENGTHS)} texts by transformers {transformers.__version__} on {device}")


def main():
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for directory in sys.argv[1:]:
        write(Path(directory), device)


if __name__ == "__main__":
    main()
