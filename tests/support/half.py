"""float16 on a CPU, which DeepSpeed refuses for want of speed: the same code, so that its rules can be tested here.

As a program, `pretrain.py` that starts from a loss scale of 2^POWER: `python half.py POWER [flags of pretrain.py]`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pretrain
from megatron_allattn.config.reporting import run_program


@contextmanager
def allowed() -> Iterator[None]:
    """DeepSpeed's own check passes."""
    from megatron_allattn.engine.deepspeed_engine import import_deepspeed

    import_deepspeed(verbose=False)
    from deepspeed.accelerator import get_accelerator

    with patch.object(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True):
        yield


def main() -> int:
    from megatron_allattn.engine.loss_scale import SETTINGS
    from megatron_allattn.training import session

    SETTINGS["initial_scale_power"] = int(sys.argv[1])
    with allowed(), patch.object(session, "_check_precision", lambda run, device: None):
        return pretrain.main(sys.argv[2:])


if __name__ == "__main__":
    run_program(main)
