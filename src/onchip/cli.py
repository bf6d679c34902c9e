"""The command line: arguments and tables only; what it calls is `onchip`'s Python interface."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

import onchip

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Exact IO-aware attention, and a small engine on it.")
explain_app = typer.Typer(no_args_is_help=True, help="What would run, what refuses and why, the floor of the hardware, and what to change.")
app.add_typer(explain_app, name="explain")
console, errors = Console(), Console(stderr=True)

# settings of the engine, in every command that makes one
Model = Annotated[str | None, typer.Option(help="a Hugging Face folder, a GGUF file or a name in the local Hugging Face cache; default: SmolLM2")]
MaxLen = Annotated[int | None, typer.Option(help="most tokens of a sequence; default: the model's context")]
CacheGib = Annotated[float | None, typer.Option(help="memory for keys and values")]
KvFormat = Annotated[str | None, typer.Option(help="keys and values quantised: int8, e4m3, int4/32, ...")]
DummyWeights = Annotated[bool, typer.Option("--dummy-weights", help="random weights from the config alone, for benchmarks")]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: the model's own")]
Draft = Annotated[str | None, typer.Option(help="guess tokens: ngram (by what stood before), or a smaller model of the same vocabulary; default: none")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one")]


def main() -> None:
    """Entry point: a mistake of the caller's is one sentence and exit status 2."""
    with one_sentence():
        app()


@contextmanager
def one_sentence() -> Iterator[None]:
    """Errors that the caller can mend end without a traceback; all others are bugs and show theirs."""
    import torch

    try:
        yield
    except (ValueError, onchip.Unsupported, onchip.OutOfPages, OSError, torch.cuda.OutOfMemoryError) as error:
        errors.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _plain(text: str) -> str:
    """Text whose brackets rich must leave alone."""
    return text.replace("[", r"\[")


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="one or more prompts; several run as one batch")] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help="a file that holds one prompt; may be given again")] = None,
    model: Model = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the prompt as it is, without the model's chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="most new tokens of each prompt")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="1: all")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0: all")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same tokens")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="a string that ends the text; may be given again")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on to --max-tokens")] = False,
    dtype: Dtype = None,
    device: Device = None,
    kernel: Annotated[str, typer.Option(help="attention's kernel by name; it runs or says why not. Or triton_skinny, for products of few rows")] = "auto",
    max_len: MaxLen = None,
    cache_gib: CacheGib = None,
    kv_format: KvFormat = None,
    draft: Draft = None,
    dummy_weights: DummyWeights = False,
) -> None:
    """Continue prompts with a model, and say how fast and by which kernels."""
    from onchip.server.reading import read_text

    texts = [*(prompts or []), *(read_text("--prompt-file", path) for path in prompt_file or [])]
    if not texts:
        raise ValueError("generate: no prompt; give one as an argument, or a file with --prompt-file")
    from onchip.engine.draft import draft_of

    how = onchip.SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed, tuple(stop or ()), ignore_eos)
    with _weights_progress() as progress:
        cache = {"max_len": max_len, "cache_gib": cache_gib, "kv_format": kv_format, "draft": draft_of(draft)}
        llm = onchip.LLM(model, dtype=dtype, device=device, kernel=kernel, **cache, dummy_weights=dummy_weights, progress=progress)
    alone = len(texts) == 1
    chat = not raw and llm.tokenizer is not None and llm.tokenizer.has_chat
    if llm.tokenizer is None and dummy_weights:  # a config alone: the words stand for random tokens
        import torch

        texts = [torch.randint(llm.config.vocab, (len(text.split()),)).tolist() for text in texts]
    done = llm.generate(texts, how, chat=chat, on_text=_stream if alone else None)
    if alone:
        print()
    else:
        for prompt, completion in zip(texts, done, strict=True):
            console.rule(_plain(str(prompt)[:60]))
            print(completion.text)
    console.print(_summary(llm))


def _stream(_index: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _weights_progress() -> Iterator:
    """A progress bar over the bytes of the weights, on the error stream."""
    bar = Progress(
        TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=errors, transient=True, disable=not errors.is_terminal
    )
    with bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _summary(llm: "onchip.LLM") -> Table:
    """How fast, how much memory, and which kernel ran each operator."""
    s = llm.stats
    table = Table(
        title=f"{llm.config.family}, {llm.config.layers} layers, {str(llm.dtype).removeprefix('torch.')} on {_place(llm.device)}", title_justify="left"
    )
    table.add_column("what")
    table.add_column("measured", justify="right")
    computed = s.prompt_tokens - s.cached_tokens
    table.add_row("prefill", f"{computed / s.prefill_seconds:,.0f} tokens/s ({computed} tokens)")
    table.add_row("decode", f"{s.decoded_tokens / s.decode_seconds:,.1f} tokens/s ({s.decoded_tokens} tokens)" if s.decoded_tokens else "none")
    if s.drafted_tokens:
        table.add_row("guessed tokens", f"{s.drafted_tokens}, {s.accepted_tokens / s.drafted_tokens:.0%} of them accepted")
    table.add_row("time to first token", f"{s.first_token_seconds * 1e3:,.0f} ms")
    table.add_row("KV memory", f"{s.cache_bytes / 2**20:,.1f} MiB of {llm.pool.num_pages * llm.pool.page_bytes / 2**20:,.0f} MiB")
    table.add_section()
    for op, kernel in s.kernels.items():
        table.add_row(op, kernel)
    table.add_row("linear", llm.model.layers[0].qkv.kernel)
    return table


def _place(device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU, {torch.get_num_threads()} threads"


# ---- serve


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="0.0.0.0: reachable from elsewhere")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8000,
    name: Annotated[str | None, typer.Option(help="what requests call the model; default: its folder's or file's name")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="a file with one key a line, of which a request must have one; default: open to all")] = None,
    embeddings: Annotated[str | None, typer.Option(help="an encoder for /v1/embeddings, in float32: minilm, or a folder; default: none")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER: a LoRA adapter, served as model NAME; may be given again")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="most tokens of a prompt; default: as the context allows")] = None,
    max_body: Annotated[int, typer.Option(help="most bytes of a request")] = 4 << 20,
    max_queued: Annotated[int, typer.Option(help="most requests that wait or run; more are turned away")] = 10_000,
    max_batch: Annotated[int, typer.Option(help="most sequences that run at once")] = 64,
    replicas: Annotated[int, typer.Option(help="engines beside each other, of a GPU each; more than one needs onchip\\[ray]")] = 1,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs of this machine that have the model together, a process each")] = 1,
    drain: Annotated[int, typer.Option(help="seconds that answers on their way have to end after SIGTERM")] = 60,
    dtype: Dtype = None,
    device: Device = None,
    max_len: MaxLen = None,
    cache_gib: CacheGib = None,
    kv_format: KvFormat = None,
    draft: Draft = None,
    step_tokens: Annotated[int | None, typer.Option(help="most tokens of a step; default: 8192 on a GPU, 1024 on a CPU")] = None,
    host_gib: Annotated[float, typer.Option(help="host memory for cached prefixes that have to leave the GPU")] = 0.0,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="the same tokens whatever else runs; slower")] = False,
    dummy_weights: DummyWeights = False,
) -> None:
    """An OpenAI-compatible server, with a page for chat and live charts at /."""
    import importlib.util

    missing = [package for package in ("fastapi", "uvicorn", "httptools", "prometheus_client", "llguidance") if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"serve: {', '.join(missing)} is not installed; pip install '.[serve]' in a checkout")
    if replicas > 1 and tensor_parallel > 1:
        raise ValueError(f"--replicas is {replicas} and --tensor-parallel {tensor_parallel}; a replica has one GPU: give one of them, or start several servers")
    if batch_invariant and tensor_parallel > 1:
        raise ValueError(f"--batch-invariant with --tensor-parallel {tensor_parallel} is not to be had: sums depend on the number of rows there; leave one out")
    if not host or name == "":
        raise ValueError(f"--{'name' if host else 'host'} is empty; give one, or leave it out")
    if replicas > 1 and port == 0:
        raise ValueError(f"--replicas is {replicas} and --port is 0; give the port: Ray's proxy would not tell which one it took")
    if replicas > 1 and importlib.util.find_spec("ray") is None:
        raise ValueError(f"--replicas is {replicas} and ray is not installed; pip install '.[ray]' in a checkout")
    from onchip.server import uncollected

    with uncollected():
        from onchip.engine.draft import draft_of
        from onchip.engine.setup import PrefixCache
        from onchip.server.app import Limits
        from onchip.server.guard import read_keys
        from onchip.server.run import Recipe, check_address, run

    keys = read_keys(api_keys) if api_keys else ()
    adapters = dict(named := [_named(one) for one in adapter or ()])
    if len(adapters) < len(named):
        raise ValueError(f"--adapter {' --adapter '.join(adapter)}: a NAME is given twice; give each adapter its own")
    counts = (("max-prompt", max_prompt, 1), ("max-body", max_body, 1), ("max-queued", max_queued, 1), ("drain", drain, 0))
    processes = (("replicas", replicas, 1), ("tensor-parallel", tensor_parallel, 1))
    for option, value, least in counts + processes:
        if value is not None and value < least:
            raise ValueError(f"--{option} is {value}; give {least} or more")
    check_address(host, port)
    if not keys and host not in ("127.0.0.1", "::1", "localhost"):
        errors.print(f"[yellow]note:[/] whoever reaches {host}:{port} may use this server; --api-keys FILE asks for a key", highlight=False)
    engine = {"model": model, "dtype": dtype, "device": device, "max_len": max_len, "max_batch": max_batch, "cache_gib": cache_gib}
    engine |= {"kv_format": kv_format, "draft": draft_of(draft), "step_tokens": step_tokens, "prefix_cache": PrefixCache(host_gib)}
    engine |= {"batch_invariant": batch_invariant, "dummy_weights": dummy_weights}
    recipe = Recipe(name, engine, Limits(max_prompt, max_body, max_queued), keys, adapters, embeddings, tensor_parallel)
    if replicas > 1:
        from onchip.server import replicas as several

        several.run(recipe, replicas, host, port, drain)
        return
    with _weights_progress() as progress, uncollected():
        app = recipe.build(progress=progress)
    run(app, host, port, drain)


def _named(adapter: str) -> tuple[str, str]:
    name, _, folder = adapter.partition("=")
    if not (name and folder):
        raise ValueError(f"--adapter {adapter!r} is not NAME=FOLDER")
    return name, folder


# ---- explain


@explain_app.command()
def attention(
    batch: int = 1,
    len_: Annotated[int, typer.Option("--len", help="queries and keys of a sequence")] = 4096,
    keys: Annotated[int | None, typer.Option(help="keys of a sequence, where they are more than the queries")] = None,
    heads: int = 32,
    kv_heads: Annotated[int | None, typer.Option(help="default: as many as heads")] = None,
    dim: int = 128,
    dtype: str = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="a query sees the keys up to its own")] = False,
    window: Annotated[int | None, typer.Option(help="a query sees its own key and this many before it")] = None,
    page: Annotated[int | None, typer.Option(help="keys are paged, this many a page: --len queries over --keys")] = None,
    kernel: str = "auto",
    gpu: Annotated[str | None, typer.Option(help="a GPU of the table, whatever this machine has; default: this machine")] = None,
) -> None:
    """Attention of these sizes."""
    import torch

    from onchip.core import device as devices
    from onchip.core.problem import SHORT, Attention
    from onchip.dispatch import OPS, select

    dtypes = {name: dtype for dtype, name in SHORT.items()}
    if dtype not in dtypes:
        raise ValueError(f"--dtype {dtype!r} is not one of {', '.join(dtypes)}")
    kv_heads, keys = heads if kv_heads is None else kv_heads, len_ if keys is None else keys
    sizes = {"--batch": batch, "--len": len_, "--keys": keys, "--heads": heads, "--kv-heads": kv_heads, "--dim": dim, "--page": page}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} {size} is not positive")
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    mask = onchip.Window(window) if window is not None else onchip.Causal() if causal else onchip.Full()
    problem = Attention("prefill", batch, len_, keys, heads, kv_heads, dim, dtypes[dtype], mask)
    if page is not None:
        problem = problem._replace(op="decode", keys="paged", page=page)
    device = devices.gpu(gpu) if gpu else torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if reasons := OPS[problem.op].kernels[-1].refuses(problem, devices.gpu("H200")):  # which takes, on any device, whatever there is
        raise onchip.Unsupported(f"{problem.op}: no kernel takes {problem}: {'; '.join(reasons)}")
    decision = select(problem, device, kernel)
    console.print(_plain(str(decision)), highlight=False, soft_wrap=True)


# ---- doctor


@app.command()
def doctor() -> None:
    """What this machine has and which kernels can run on it: one screen for a bug report."""
    from onchip.analysis import doctor

    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path that is cut off is of no use in a report
    for name, fact in doctor.facts():
        table.add_row(name, fact)
    console.print(table)
    kernels = Table("operator", "kernel", "here")
    for op, kernel, reasons in doctor.kernels():
        kernels.add_row(op, kernel, _plain("; ".join(reasons)) if reasons else "runs")
    console.print(kernels)


# ---- bench


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="attention, decode, backward, mods, gym, sdpa, generate, serve, dispatch, rows, block, io or quality")],
    only: Annotated[str, typer.Option(help="rows whose Problem or plot contains this text")] = "",
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path("benchmarks/results"),
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer rows and samples")] = False,
) -> None:
    """Time onchip and every installed peer in turn, and write JSON and a page with plots."""
    from onchip.bench.run import bench as run
    from onchip.core.device import named

    print(run(suite, named(device), out, only, quick))


if __name__ == "__main__":
    main()
