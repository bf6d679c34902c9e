"""Whom the serving suite is timed beside: transformers in three ways, on the same config, random tokens and dtype."""

import statistics
import time
from collections.abc import Callable

import torch

from onchip.bench import data
from onchip.bench.serve_engines import SHAPES
from onchip.engine.request import SamplingParams

CONTINUOUS = "transformers' generate_batch"
COMPILED = "transformers' static cache, compiled"  # stands for gpt-fast, which is no package: its loop, a step by torch.compile's reduce-overhead
GENERATE = "transformers' generate"


def model_of(name: str, dtype: torch.dtype, device: torch.device):
    """The model in transformers, of random weights where ours are."""
    import transformers

    if SHAPES[name] is None:
        return data.packaged_model(dtype, device)
    given = {key: value for key, value in SHAPES[name].items() if key not in ("model_type", "torch_dtype")}
    config = transformers.AutoConfig.for_model(SHAPES[name]["model_type"], **given)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def continuous_batching(name: str, dtype: torch.dtype, device: torch.device, prompts: list[list[int]], p: SamplingParams) -> float:
    """Tokens a second of `generate_batch`, from the moment its first request runs until its last one ends: making its cache and its graphs does not count."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = {"max_new_tokens": p.max_tokens, "do_sample": p.temperature > 0, "eos_token_id": -1, "pad_token_id": 0}
    if p.temperature > 0:
        how |= {"temperature": p.temperature, "top_k": 0, "top_p": 1.0}
    model, cache = model_of(name, dtype, device), ContinuousBatchingConfig()
    page = cache.page_size if hasattr(cache, "page_size") else cache.block_size  # what earlier versions call it
    cache.num_blocks = sum(-(-(len(prompt) + p.max_tokens) // page) for prompt in prompts)  # all at once: its own choice is most of the memory
    given = {"generation_config": GenerationConfig(**how), "continuous_batching_config": cache, "progress_bar": False}
    model.generate_batch(prompts[: max(2, len(prompts) // 32)], **given)
    found = list(model.generate_batch(prompts, **given).values())
    tokens = sum(len(result.generated_tokens) for result in found)
    if tokens != len(prompts) * p.max_tokens:
        raise RuntimeError(f"{tokens} tokens came of {len(prompts)} requests of {p.max_tokens}")
    return tokens / (max(result.lifespan[1] for result in found) - min(result.lifespan[0] for result in found))


def compiled_loop(name: str, dtype: torch.dtype, device: torch.device, prompt: list[int], new: int, repeats: int) -> float:
    """Tokens a second at batch 1, the median: gpt-fast's loop over a model of transformers. The prompt's pass is eager, each step after it compiled."""
    from transformers import StaticCache

    model = model_of(name, dtype, device)
    cache, ids = StaticCache(config=model.config, max_cache_len=len(prompt) + new), torch.tensor([prompt], device=device)

    def following(ids):
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    step = torch.compile(following, mode="reduce-overhead", fullgraph=True)

    def go() -> list[int]:
        cache.reset()
        tokens = [following(ids)]
        while len(tokens) < new:
            torch.compiler.cudagraph_mark_step_begin()
            tokens.append(step(tokens[-1]).clone())  # the next replay writes over it
        return torch.cat(tokens, 1)[0].tolist()

    with torch.no_grad():
        if go() != go():
            raise RuntimeError("its two runs do not agree: its cache is not as it was")
        readings = []
        for _ in range(repeats):
            start = time.perf_counter()
            go()
            readings.append(time.perf_counter() - start)
    return new / statistics.median(readings)


def padded_batch(name: str, dtype: torch.dtype, device: torch.device, prompts: list[list[int]], new: int) -> Callable[[], float]:
    """A call that gives tokens a second of `generate` on all prompts at once, filled up on the left."""
    model, longest = model_of(name, dtype, device), max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)

    def go() -> float:
        start = time.perf_counter()
        out = model.generate(ids, attention_mask=seen, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return (out.shape[1] - longest) * len(prompts) / (time.perf_counter() - start)

    return go
