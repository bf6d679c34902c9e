"""The own test files of torch, transformers and diffusers, unchanged, with onchip where they call torch's attention.

    python tests/integrations/peers_torch.py CHECKOUT torch [--count 40] [-- pytest's arguments]
    python tests/integrations/peers_torch.py CHECKOUT llama gemma3 bert ...
    python tests/integrations/peers_torch.py CHECKOUT flux dit unet ...

CHECKOUT is a work tree of github.com/pytorch/pytorch, huggingface/transformers or huggingface/diffusers. torch's tests are of the torch that is installed,
and need expecttest; the other two run by the package of their CHECKOUT, transformers' need `datasets` and parameterized. `--count` is of a test's cases.
In torch's file and in diffusers the function is patched, and "onchip" is diffusers' backend under test; in transformers "onchip" has the names of "sdpa".
What loads a model from the hub, compiles it, or spreads it over processes is not run; nor are models that never call torch's attention (GPT-OSS).
"""

import collections
import importlib
import inspect
import os
import random
import re
import sys

import pytest
from peers import Sampled, main

MODELS = ("bert", "gemma2", "gemma3", "llama", "mistral", "modernbert", "qwen3", "t5", "whisper")
DIFFUSION = {"dit": "models_dit_transformer2d", "flux": "models_transformer_flux", "sd3": "models_transformer_sd3", "wan": "models_transformer_wan"}
SUITES = {  # name -> (file, folders whose modules it imports)
    "torch": ("test/test_transformers.py", ("test",)),
    **{name: (f"tests/models/{name}/test_modeling_{name}.py", ("src", ".")) for name in MODELS},
    **{name: (f"tests/models/transformers/test_{file}.py", ("src", ".")) for name, file in DIFFUSION.items()},
    "unet": ("tests/models/unets/test_models_unet_2d_condition.py", ("src", ".")),
}
DRAWS = "what dropout drops is drawn by Philox, not as torch draws it"
BATCHES = "asks for a batch of backward passes at once, which is refused"
NOT_OURS = {  # the beginning of a test's name -> why a drop-in cannot pass it
    "test_disable_fastpath": "torch's fused encoder, which goes round the function, is turned off",
    "test_mask_check_fastpath": "torch's fused encoder, which goes round the function, is turned off",
    "test_transformerencoderlayer_subclass": DRAWS,
    r"test_scaled_dot_product_attention_\dD_.*_dropout_p_0_[25]": DRAWS,
    r"test_scaled_dot_product_attention_\dD_input_dim_no_attn_mask": BATCHES,
    "test_sdp_math_gradcheck": BATCHES,
    "test_invalid_sdpa_kernel": "counts warnings of torch's kernels",
}
ATTENTION = "assisted attention attn backend batching beam cache eager equivalence generate gradient mask output pack padding processor sdpa sliding training"
ELSEWHERE = "compil export fsdp hub multi_gpu overfit parallel pipeline pretrained tp_ tiny_model"


class Torch(Sampled):
    """onchip where torch's attention is called."""

    not_ours, only_gpu = NOT_OURS, {}

    def install(self):
        os.environ["HF_HUB_OFFLINE"] = "1"
        if self.options.suites[0] == "torch":
            from onchip.integrations import sdpa

            sdpa.install()
        elif (self.options.checkout / "src" / "diffusers").is_dir():
            self._diffusers()
        else:
            self._transformers()

    def _diffusers(self):
        from diffusers.models.attention_dispatch import AttentionBackendName

        from onchip.integrations import diffusers, sdpa

        diffusers.install()
        sdpa.install()
        tested = importlib.import_module("tests.models.testing_utils.attention")
        tested._ALL_BACKEND_PARAMS[:] = [pytest.param(AttentionBackendName("onchip"), id="onchip")]

    def _transformers(self):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from onchip.integrations import transformers

        transformers.install()
        for ours, theirs in zip(transformers.NAMES, ("sdpa", "paged|sdpa"), strict=True):
            ALL_ATTENTION_FUNCTIONS.register(theirs, ALL_ATTENTION_FUNCTIONS[ours])
            ALL_MASK_ATTENTION_FUNCTIONS.register(theirs, ALL_MASK_ATTENTION_FUNCTIONS[ours])

    def pytest_configure(self):
        from onchip import record

        self.install()
        self.recorded = record()
        self.decisions = self.recorded.__enter__()

    def pytest_generate_tests(self, metafunc):
        """Each test as it is; samples are of what was collected, since unittest's are not parametrized by pytest."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        cases = collections.defaultdict(list)
        for item in items:
            why = next((why for name, why in self.not_ours.items() if re.match(name, item.name)), None)
            if why and self.options.suites[0] == "torch":
                self.left_out[item.name] = why
            elif self.options.suites[0] == "torch" or self._here(item):
                cases[item.parent.name, getattr(inspect.unwrap(item.function), "__name__", item.name)].append(item)
        count = self.options.count or sys.maxsize
        items[:] = [x for test, each in cases.items() for x in random.Random(f"{self.options.seed} {test}").sample(each, min(count, len(each)))]

    def _here(self, item) -> bool:
        name = f"{item.parent.name} {item.name}".lower()
        return (self.options.suites[0] not in MODELS or any(word in name for word in ATTENTION.split())) and not any(word in name for word in ELSEWHERE.split())

    def pytest_terminal_summary(self, terminalreporter):
        super().pytest_terminal_summary(terminalreporter)
        terminalreporter.write_line(f"calls of onchip: {len(self.decisions)}")


if __name__ == "__main__":
    sys.exit(main(SUITES, Torch, __file__, __doc__, "-o", "log_cli=false"))
