"""One model over several GPUs: `python -m onchip.bench.ranks 1 2 4` writes benchmarks/results/<device>/ranks.json.

Each rank is a process with its share of a model of random weights (`TensorParallel`); a step is a CUDA graph, sums over ranks inside. The floor of a step
is its rank's weights and keys over the bandwidth measured in the same run; before anything is timed, a small model in float32 is held against one rank.
Then the engine on all ranks (`ParallelLLM`) runs the protocol that `bench serve` runs on one GPU.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from onchip.bench.run import RESULTS, _describe, _measured, _origin
from onchip.bench.serve import LLAMA, MANY, PROTOCOL
from onchip.bench.serve_engines import SHAPES, Engines, load, warm
from onchip.bench.serve_rows import run
from onchip.cache.paged import PageList, PagePool
from onchip.dispatch import select
from onchip.kernels.compiling import compilations
from onchip.models.decoder import Decoder, Step
from onchip.models.families import ModelConfig
from onchip.models.parallel import ALONE, TensorParallel
from onchip.ops.ranks import rank_problem

SMALL = SHAPES[LLAMA] | {"head_dim": 32, "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
BATCHES, TOKENS, PAGE = (1, 16, 64), 1024, 16
READINGS = 30


def decoder(raw: dict, dtype: torch.dtype, device: torch.device, parallel: TensorParallel, weights: dict | None = None) -> Decoder:
    """With random weights, or with these, of the whole model."""
    model = Decoder(ModelConfig.read(raw), dtype=dtype, device=device, parallel=parallel)
    if weights is None:
        model.randomise(seed=parallel.rank)
    else:
        model.load(weights.items())
    model.prepare(2 * TOKENS)
    return model


def step_of(model: Decoder, batch: int) -> tuple[Step, PagePool]:
    """A decode step over `TOKENS` keys of each sequence, random ones."""
    c, each = model.config, TOKENS // PAGE + 1
    pool = PagePool(c.layers, batch * each, PAGE, c.kv_heads, c.dim, dtype=model.dtype, device=model.device)
    for tensor in pool.storage:
        tensor.normal_(generator=torch.Generator(model.device).manual_seed(0))
    sequences = [PageList() for _ in range(batch)]
    slots = torch.stack([pool.append(pages, TOKENS + 1)[-1] for pages in sequences]).to(model.device)
    tokens, at = torch.arange(1, batch + 1, device=model.device), torch.full((batch,), TOKENS, device=model.device)
    return Step(tokens, at, slots, page_table=pool.table(sequences).to(model.device), lengths=(at + 1).int()), pool


def captured(model: Decoder, step: Step, pool: PagePool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The step from tokens to logits as a graph, and its logits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model.logits(model.forward(step, pool))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.logits(model.forward(step, pool))
    return graph, logits


def agreement(parallel: TensorParallel, device: torch.device) -> float:
    """The largest difference of a logit from one rank's, by the largest logit: float32, the same weights, in a graph. 0 keys are in the cache."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, (_, spans) in Decoder(ModelConfig.read(SMALL), dtype=torch.float32, device=torch.device("cpu")).places.pieces.items():
        shape = [span.whole for span in spans]
        weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
    found = []
    for ranks in (ALONE, parallel):
        model = decoder(SMALL, torch.float32, device, ranks, weights)
        step, pool = step_of(model, 5)
        step = step._replace(positions=torch.zeros_like(step.positions), lengths=torch.ones_like(step.lengths), slots=step.page_table[:, 0].long() * PAGE)
        graph, logits = captured(model, step, pool)
        logits.fill_(torch.nan)
        graph.replay()
        found.append(logits.clone())
    return ((found[1] - found[0]).abs().max() / found[0].abs().max()).item()


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    """The median of replays, by this rank's GPU: no rank is done before the slowest."""
    times = []
    for _ in range(READINGS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return sorted(times)[READINGS // 2]


def protocol(parallel: TensorParallel, device: torch.device, bandwidth: float) -> list[dict]:
    """What the engine on all ranks makes of nano-vllm's protocol, a row; none from the ranks that follow."""
    torch.cuda.empty_cache()
    llm = load(LLAMA, device, MANY, parallel)
    if parallel.rank:
        llm.follow()
        return []
    warm(llm, PROTOCOL)
    engines, asked, compiled = Engines(device, bandwidth), PROTOCOL.draw(llm.config.vocab), -1
    while compiled != compilations.compiled:  # else once more: all wait for it; ranks compile the same
        compiled = compilations.compiled
        seconds, tokens = run(engines, llm, *asked)
        llm.forget()
    llm.close()
    row = {"model": f"{LLAMA}, bf16", "ranks": parallel.of, "protocol": "nano-vllm's", "tokens": tokens, "seconds": seconds}
    return [row | {"tokens_per_second": tokens / seconds, "preemptions": llm.stats.preemptions}]


@torch.inference_mode()
def one_rank(rank: int, of: int, folder: str) -> None:
    """The rows of `of` ranks, written by the first of them."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/ranks{of}", rank=rank, world_size=of, device_id=device)
    parallel = TensorParallel.join()
    error = agreement(parallel, device) if of > 1 else 0.0
    assert error < 1e-4, f"{of} ranks differ from one by {error:.1e} of the largest logit"
    facts, model, rows = _measured(device), decoder(SHAPES[LLAMA], torch.bfloat16, device, parallel), []
    matrices = [linear.weight for layer in model.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [model.head.weight]
    weights = sum(matrix.nbytes for matrix in matrices)
    for batch in BATCHES:
        step, pool = step_of(model, batch)
        graph, _ = captured(model, step, pool)
        seconds = seconds_of(graph)
        floor = (weights + batch * TOKENS / PAGE * pool.page_bytes) / facts.bandwidth
        row = {"model": f"{LLAMA}, bf16", "ranks": of, "batch": batch, "keys": TOKENS, "seconds": seconds, "tokens_per_second": batch / seconds}
        sums = select(rank_problem(model.embedding[:batch], model.ranks), device).kernel.name if of > 1 else "none"
        rows.append(row | {"floor": floor, "of_floor": floor / seconds, "error": error, "sums": sums, "apart": model.ranks.apart})
        del graph, pool, step
        torch.cuda.empty_cache()
    del model, matrices
    rows += protocol(parallel, device, facts.bandwidth)
    if rank == 0:
        result = {"suite": "ranks", "device": _describe(device, facts), **_origin(), "rows": rows}
        (Path(folder) / f"{of}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def said(row: dict) -> str:
    head = f"{row['ranks']} ranks, {row['tokens_per_second']:.0f} tokens/s: "
    if "protocol" in row:
        return head + f"{row['protocol']} protocol, {row['tokens']} tokens in {row['seconds']:.2f} s"
    head += f"batch {row['batch']}, {row['seconds'] * 1e3:.2f} ms a step, {row['of_floor']:.0%} of the floor; sums by {row['sums']}"
    return head + f" ({row['apart']})" * bool(row["apart"]) + f"; float32 differs by {row['error']:.1e}"


def main(counts: list[int], out: Path = RESULTS) -> None:
    """Every count in turn; prints a line a row and leaves one file, written anew after each count."""
    start, merged = time.perf_counter(), None
    with tempfile.TemporaryDirectory() as folder:
        for of in counts:
            torch.multiprocessing.spawn(one_rank, (of, folder), nprocs=of)
            result = json.loads((Path(folder) / f"{of}.json").read_text())
            merged = merged or result | {"rows": []}
            merged["rows"] += result["rows"]
            path = out / merged["device"]["slug"] / "ranks.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(merged, indent=1) + "\n")
            for row in result["rows"]:
                print(said(row), flush=True)
    print(f"{path} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]] or [1])
