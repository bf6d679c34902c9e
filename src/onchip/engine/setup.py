"""What an engine is made of: device, dtype, page pool, prefix cache and tokenizer, from the arguments of `LLM`."""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import torch

from onchip import dispatch
from onchip.cache.paged import OutOfPages, PagePool
from onchip.cache.radix import RadixTree
from onchip.cache.swap import HostPool
from onchip.core import device as devices
from onchip.core.formats import Format
from onchip.core.kernel import Unsupported
from onchip.core.problem import DTYPES, SHORT, Rows
from onchip.engine.draft import Guesses
from onchip.engine.scheduler import Unshared
from onchip.models import kinds, weights
from onchip.models.decoder import Decoder
from onchip.models.families import ModelConfig
from onchip.models.gguf import ModelError, Progress
from onchip.models.kinds import DEVICE, Kind, is_number, is_whole, of_type
from onchip.models.lora import AdapterSlots
from onchip.models.parallel import ALONE, TensorParallel
from onchip.models.tokenizer import Tokenizer

GIB = 1 << 30
PAGE = 16  # tokens
MOST_BATCH = 1 << 16  # each has a row of the engine's state from the start
MOST_GIB = 1e9  # bytes of which fit in 64 bits
CPU_CACHE = 2 * GIB  # keys and values on a CPU: memory is only taken when it is written
GPU_SHARE = 0.8  # of the memory that is free once the weights are in


@dataclass(frozen=True)
class PrefixCache:
    """Prompts and answers stay in the cache as long as nobody needs their pages, and what begins like one of them begins from there.

    With a `kv_format` such a beginning is read as codes, where a prompt that nobody knew reads its keys unrounded: see `LLM`.

    host_gib   host memory for what has to leave the GPU, from which it comes back; also that of requests which had to give way. 0: it is computed again.
    """

    host_gib: float = 0.0


OPTIONS = {  # of LLM, but for those that name what is read
    "device": DEVICE,
    "kernel": of_type("the name of a kernel, or auto", str),
    "max_len": Kind("2 or more, as an integer: a token of the prompt and one of the answer; or None", lambda value: value is None or is_whole(value, 2)),
    "max_batch": Kind(f"1 to {MOST_BATCH}, as an integer", lambda value: is_whole(value, 1, MOST_BATCH)),
    "cache_gib": Kind("a number of GiB, or None", lambda value: value is None or is_number(value, -MOST_GIB, MOST_GIB)),
    "prefix_cache": of_type("PrefixCache(), or None for no prefix cache", PrefixCache, NoneType),
    "step_tokens": Kind("1 or more, as an integer; or None", lambda value: value is None or is_whole(value, 1)),
    "batch_invariant": of_type("True or False", bool),
    "draft": of_type("NGram(), DraftModel(name of a smaller model), or None", Guesses, NoneType),
    "dummy_weights": of_type("True or False", bool),
    "progress": Kind("what can be called as (bytes done, bytes in all), or None", lambda value: value is None or callable(value)),
    "parallel": of_type("TensorParallel.join(), to ParallelLLM; leave it out for one device", TensorParallel),
    "adapters": of_type("AdapterSlots(slots, rank), or None", AdapterSlots, NoneType),
}


def tree_of(pool: PagePool, prefix: PrefixCache | None) -> RadixTree | Unshared:
    """The prefix cache over a pool, or what stands in for none. Raises ValueError for less host memory than a page takes."""
    if prefix is None:
        return Unshared(pool)
    each, given = pool.page_bytes, is_number(prefix.host_gib, -1, MOST_GIB)
    if given and prefix.host_gib == 0:
        return RadixTree(pool)
    slots = int(prefix.host_gib * GIB) // each if given else 0
    if slots < 1:
        raise ValueError(f"PrefixCache: host_gib is {prefix.host_gib!r:.60}; give 0 (none), or at least {each / GIB:.3g} for a page")
    try:
        return RadixTree(pool, HostPool(pool, slots))
    except RuntimeError as error:  # torch's, whose text is a stack of C++
        raise OutOfPages(f"PrefixCache: host_gib is {prefix.host_gib:g}, which this machine has no memory for; give less") from error


def decoder_of(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, positions: int, *,
    rows: int | None = None, dummy_weights: bool = False, progress: Progress | None = None, parallel: TensorParallel = ALONE,
) -> Decoder:  # fmt: skip
    """A model with its weights, or random ones, ready for texts of so many positions; `rows`: of its rotary tables."""
    try:
        model = Decoder(config, dtype=dtype, device=device, parallel=parallel)
    except RuntimeError as error:  # a GPU's says what it is; a CPU's is torch's stack of C++
        if device.type != "cpu":
            raise
        raise ModelError(f"{path}: there is no memory for a model of its sizes ({str(error).splitlines()[0]}); take a smaller model") from error
    if dummy_weights:
        model.randomise()
    else:
        model.load(weights.views(path, dtype, progress))
    model.prepare(positions, rows)
    return model


def second_of(name: str | Path, target: ModelConfig, tokenizer: Tokenizer | None) -> tuple[Path, ModelConfig]:
    """Where a draft model is, and its config. Raises ValueError for another vocabulary than the target's. Their logits may be padded to different widths, as
    those of Qwen2.5's sizes are, where tokenizers tell that the tokens are the same."""
    try:
        path = weights.locate(name)
        config, words = ModelConfig.read(weights.read_config(path)), tokenizer_of(path)
    except ModelError as error:
        raise ModelError(f"draft: {error}; or NGram(), --draft ngram on a command line, which needs no model") from None
    if config.vocab != target.vocab and not (tokenizer and words):
        raise ValueError(f"draft: {str(name)!r} has {config.vocab} tokens in its vocabulary, the model {target.vocab}; give a draft model with the model's own")
    if tokenizer and words and (other := words.difference(tokenizer)) is not None:
        raise ValueError(f"draft: to {str(name)!r} the text {other!r} is another token than to the model; give a draft model with the model's own vocabulary")
    return path, config


def pool_of(model: Decoder, second: Decoder | None, sizes: tuple[int, int], cache_gib: float | None, kv_format: Format | None) -> PagePool:
    """The page pool for `cache_gib`, or for what the device can spare, and with `cache_gib` None no larger than the sequences of `sizes` need.

    sizes   how many sequences, of how many tokens. All ranks that have the model have as many pages.        second   a draft model, whose keys and values
            are beside.
    """
    page, device = PAGE, model.device
    each = _page_bytes(model, kv_format) + (_page_bytes(second, None) if second else 0)
    if cache_gib is not None:
        budget = int(cache_gib * GIB)
    elif device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    else:
        budget = min(CPU_CACHE, devices.of(device).memory // 4)
    sequences, tokens = sizes
    pages = budget // each if cache_gib is not None else min(budget // each, sequences * -(-tokens // page))
    pages = model.parallel.least(pages, device)
    if pages < 1:
        raise OutOfPages(f"cache_gib {budget / GIB:.3g} holds no page of {page} tokens ({each / GIB:.3g} GiB); give at least {each / GIB:.3g}")
    try:
        pool = _pages(model, pages, kv_format)
        pool.beside = second and _pages(second, pages, None)
    except RuntimeError as error:  # torch's allocators: out of memory
        raise OutOfPages(f"{pages * each / GIB:.1f} GiB for the cache are not to be had on {device}; give a smaller cache_gib ({error})") from error
    return pool


def _page_bytes(model: Decoder, form: Format | None) -> int:
    c = model.config
    return PagePool.bytes_per_page(c.layers, PAGE, c.kv_heads, c.dim, model.dtype, form)


def _pages(model: Decoder, count: int, form: Format | None) -> PagePool:
    c = model.config
    return PagePool(c.layers, count, PAGE, c.kv_heads, c.dim, dtype=model.dtype, device=model.device, format=form)


def check_options(**given: object) -> None:
    """Raises ValueError for an option of `OPTIONS` that is something else, and for some that do not go together."""
    kinds.check_options("", given, OPTIONS)
    if given["batch_invariant"] and given["draft"] is not None:
        raise ValueError("draft: a batch's size says whether tokens are guessed, and so how they are computed; leave draft or batch_invariant out")
    if given["batch_invariant"] and (given["adapters"] or given["parallel"].of > 1):
        raise ValueError("batch_invariant with adapters or over several ranks is not to be had: sums depend on the number of rows there; leave one out")


def length_of(max_len: int | None, context: int) -> int:
    """Most tokens of a sequence. Raises ValueError for more than the model's context."""
    if max_len is not None and max_len > context:
        raise ValueError(f"max_len is {max_len} and the model's context is {context} tokens; give 2 to {context}, or leave it out for all of it")
    return context if max_len is None else max_len


def dtype_of(name: str | None, model: torch.dtype, device: torch.device) -> torch.dtype:
    if name is not None:
        if name not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"dtype {name!r} is not one of bf16, fp16, fp32")
        return DTYPES[name]
    if device.type == "cpu" and SHORT[model] != "fp32":  # half precision pays on a CPU with bf16 arithmetic only
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return model


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The model's tokenizer; None for a folder without one, which takes token ids only."""
    return Tokenizer.load(path) if path.is_file() or (path / "tokenizer.json").exists() else None


def check_kernel(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Unsupported for the name of no kernel, and for one of few rows' products that does not run here; of attention's each call will say."""
    products = dispatch.OPS["skinny_linear"]
    attention = {kernel.name: op for op in (dispatch.OPS["prefill"], dispatch.OPS["decode"]) for kernel in op.kernels}
    few = [kernel.name for kernel in products.kernels if not kernel.portable]
    if name not in attention and name not in few:
        raise Unsupported(f"kernel {name!r} does not exist; attention has {', '.join(attention)}, products of few rows {', '.join(few)}, or leave auto")
    if name in few:
        dispatch.select(Rows(products.name, 1, 64, dtype, "from 64 norm"), device, name)
