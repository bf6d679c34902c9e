"""LoRA adapters of mixed requests against the model with each adapter merged into its weights."""

import pytest
import torch
from safetensors.torch import save_file

import tiny
from onchip.cache.paged import PageList, PagePool
from onchip.models.decoder import Decoder, Step
from onchip.models.families import ModelConfig
from onchip.models.gguf import ModelError
from onchip.models.lora import Adapter, AdapterSlots, AdapterTable

CPU = torch.device("cpu")


def made(raw, tensors, positions=64):
    model = Decoder(ModelConfig.read(raw), dtype=torch.float32, device=CPU)
    model.load(tensors.items())
    model.prepare(positions)
    return model


def logits(model, prompts, adapters):
    """Of packed prompts and of one step of decoding behind each; `adapters`: one a prompt, or None."""
    c = model.config
    pool, pages, lengths = (
        PagePool(c.layers, 16, 8, c.kv_heads, c.dim, dtype=torch.float32, device=CPU),
        [PageList() for _ in prompts],
        [len(p) for p in prompts],
    )
    slots = torch.cat([pool.append(p, n) for p, n in zip(pages, lengths, strict=True)])
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    each = None if adapters is None else torch.tensor(adapters, dtype=torch.int32)
    of_tokens = None if each is None else each.repeat_interleave(torch.tensor(lengths))
    step = Step(torch.cat(prompts), torch.cat([torch.arange(n) for n in lengths]), slots, offsets, max(lengths), adapters=of_tokens)
    first = model.logits(model.forward(step, pool))
    at = torch.tensor(lengths)
    slots = torch.cat([pool.append(p, 1) for p in pages])
    step = Step(first[offsets[1:].long() - 1].argmax(1), at, slots, page_table=pool.table(pages), lengths=at.int() + 1, adapters=each)
    return first.split(lengths), model.logits(model.forward(step, pool))


@torch.inference_mode()
def test_requests_with_adapters_are_as_of_merged_weights(tmp_path):
    base = tiny.tensors(tiny.CONFIG)
    one = tiny.save_adapter(tmp_path / "one", 1, alpha_pattern={"up_proj": 12})
    two = tiny.save_adapter(tmp_path / "two", 2, rank=5, layers=(1,), use_rslora=True)
    model = made(tiny.CONFIG, base)
    model.adapters = table = AdapterTable(model, AdapterSlots(3, 5))
    assert [table.add(Adapter.read(tmp_path / name)) for name in ("two", "one")] == [0, 1]
    prompts = [torch.randint(320, (n,)) for n in (9, 1, 17, 5)]
    wanted = [1, -1, 0, 1]
    first, second = logits(model, prompts, wanted)
    merged = {i: made(tiny.CONFIG, {name: t + deltas.get(name, 0) for name, t in base.items()}) for i, deltas in ((-1, {}), (0, two), (1, one))}
    for n, i in enumerate(wanted):
        (alone,), after = logits(merged[i], prompts[n : n + 1], None)
        torch.testing.assert_close(first[n], alone, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(second[n : n + 1], after, atol=2e-4, rtol=1e-4)
        if i >= 0:
            assert (logits(merged[-1], prompts[n : n + 1], None)[0][0] - alone).abs().max() > 0.1  # an adapter is no rounding
    table.remove("two")
    assert table.add(Adapter.read(tmp_path / "one", name="three")) == 0  # its slot holds nothing of what it held
    swapped, _ = logits(model, prompts, [0, 0, 0, 1])
    torch.testing.assert_close(swapped[0], first[0])
    torch.testing.assert_close(swapped[3], first[3])


@torch.inference_mode()
def test_an_adapter_of_fused_matrices(tmp_path):
    """Phi-3's: one A for q, k and v, and one for gate and up."""
    raw = tiny.CONFIG | {"model_type": "phi3"}
    base = tiny.tensors(raw)
    shapes = {"self_attn.qkv_proj": (128, 64), "mlp.gate_up_proj": (192, 64)}
    deltas = tiny.save_adapter(tmp_path / "phi", 3, modules=shapes)
    model = made(raw, base)
    model.adapters = AdapterTable(model, AdapterSlots(1, 4))
    model.adapters.add(Adapter.read(tmp_path / "phi"))
    added = dict(base)
    for i in (0, 1):
        for fused, parts in {
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }.items():
            names = [f"model.layers.{i}.{part}.weight" for part in parts]
            rows = deltas[f"model.layers.{i}.{fused}.weight"].split([len(base[name]) for name in names])
            added |= {name: base[name] + part for name, part in zip(names, rows, strict=True)}
    prompts = [torch.randint(320, (12,))]
    torch.testing.assert_close(logits(model, prompts, [0])[0], logits(made(raw, added), prompts, None)[0], atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_an_adapter_of_a_model_whose_rotary_pairs_lie_side_by_side(tmp_path):
    """As in GGUF files of the Llama family: rows of q and k are moved, the adapter's stay as PEFT has them."""
    base, prompts, found = tiny.tensors(tiny.CONFIG), [torch.randint(320, (12,))], []
    moved = {name: t.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2) if "q_proj" in name or "k_proj" in name else t for name, t in base.items()}
    tiny.save_adapter(tmp_path / "one", 1)
    for raw, tensors in ((tiny.CONFIG, base), (tiny.CONFIG | {"rope_interleaved": True}, moved)):
        model = made(raw, tensors)
        model.adapters = AdapterTable(model, AdapterSlots(1, 4))
        model.adapters.add(Adapter.read(tmp_path / "one"))
        found.append(logits(model, prompts, [0])[0][0])
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)


def test_adapters_that_cannot_be(tmp_path, monkeypatch):
    model = made(tiny.CONFIG, tiny.tensors(tiny.CONFIG))
    for folder, name in ((3, None), (None, None), ("x", 3)):
        with pytest.raises(ModelError, match=r"^adapter .*: give a folder that PEFT's save_pretrained wrote, and a name as text or None"):
            Adapter.read(folder, name)
    for room in (AdapterSlots(0, 4), AdapterSlots(1.5, 4), AdapterSlots(1, None), AdapterSlots(True, 4), AdapterSlots(10**30, 4)):
        with pytest.raises(ValueError, match=r"AdapterSlots: slots is .*; give whole numbers of 1 or more"):
            AdapterTable(model, room)
    table = AdapterTable(model, AdapterSlots(1, 4))
    tiny.save_adapter(tmp_path / "good", 0, init_lora_weights=True, lora_dropout=0.1, qalora_group_size=16, use_qalora=False, use_bdlora=None)
    monkeypatch.chdir(tmp_path / "good")
    assert Adapter.read(".").name == "good"
    cases = (
        ("no adapter_config.json", None, {}),
        ("peft_type is 'IA3'", "ia3", {"peft_type": "IA3"}),
        ("use_dora is True", "dora", {"use_dora": True}),
        ("modules_to_save is .'lm_head'.", "saved", {"modules_to_save": ["lm_head"]}),
        ("bias is 'all'", "bias", {"bias": "all"}),
        ("alora_invocation_tokens is .5.", "late", {"alora_invocation_tokens": [5]}),
        ("init_lora_weights is 'pissa'", "pissa", {"init_lora_weights": "pissa"}),
        ("target_parameters is .'x'.", "parameters", {"target_parameters": ["x"]}),
        ("use_what_comes_next is True", "next", {"use_what_comes_next": True}),
        ("lora_alpha is None; it must be a number", "alpha", {"lora_alpha": None}),
        ("lora_alpha is 1000", "large", {"lora_alpha": 10**400}),
        ("alpha_pattern is {'k_proj': 'x'}; it must be an object of regular expressions and numbers", "text", {"alpha_pattern": {"k_proj": "x"}}),
        ("alpha_pattern is {'.': 1}", "expression", {"alpha_pattern": {"(": 1}}),
        ("use_rslora is 'no'; it must be true or false", "rslora", {"use_rslora": "no"}),
    )
    for words, name, config in cases:
        if name:
            tiny.save_adapter(tmp_path / name, 0, **config)
        with pytest.raises(ModelError, match=words):
            Adapter.read(tmp_path / (name or "nothing"))
    cases = (
        (ValueError, "has rank 5, the table 4", {"rank": 5}),
        (ModelError, r"'model.layers.7.*' is no matrix", {"layers": (0, 7)}),
        (ModelError, r"is for a matrix \[64, 32\], the model's is \[64, 64\]", {"modules": {"self_attn.q_proj": (64, 32)}}),
    )
    for n, (kind, words, how) in enumerate(cases):
        tiny.save_adapter(tmp_path / str(n), 0, **how)
        with pytest.raises(kind, match=words):
            table.add(Adapter.read(tmp_path / str(n)))
    assert table.names == [None] and not model.layers[0].qkv.adapters.a.any()
    table.add(Adapter.read(tmp_path / "good"))
    assert table.add(Adapter.read(tmp_path / "good")) == 0  # again: in its place
    with pytest.raises(ValueError, match="all 1 slots are taken, by good"):
        table.add(Adapter.read(tmp_path / "good", name="other"))
    for a, b in (((0, 64), (64, 0)), ((3, 64, 1), (64, 3))):
        names = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
        save_file(dict(zip(names, map(torch.zeros, (a, b)), strict=True)), tmp_path / "good" / "adapter_model.safetensors")
        with pytest.raises(ModelError, match="it takes an A"):
            Adapter.read(tmp_path / "good")
    save_file(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(3, 64, dtype=torch.int32)},
        tmp_path / "good" / "adapter_model.safetensors",
    )
    with pytest.raises(ModelError, match=r"lora_A.weight' is torch.int32; it must be of floating-point numbers"):
        Adapter.read(tmp_path / "good")
    (tmp_path / "good" / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="truncated"):
        Adapter.read(tmp_path / "good")
