"""The backend "onchip" beside torch's, on tiny random diffusion models: outputs and gradients."""

import inspect

import diffusers  # whose models are imported where they are made: 3 s that most processes need not spend
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend, dispatch_attention_fn

import onchip
from onchip.integrations import diffusers as integration
from onchip.integrations import sdpa

SPACES = {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32, "num_layers": 1}
BLOCKS = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}


def flux():
    model = diffusers.FluxTransformer2DModel(patch_size=1, in_channels=4, num_single_layers=1, axes_dims_rope=[4, 4, 8], **SPACES)
    given = {"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 6, 32), "pooled_projections": torch.randn(2, 32)}
    return model, {**given, "timestep": torch.tensor([0.1, 0.2]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}


def sd3():
    model = diffusers.SD3Transformer2DModel(sample_size=8, in_channels=4, caption_projection_dim=32, pos_embed_max_size=8, **SPACES)
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 6, 32), "pooled_projections": torch.randn(2, 32)}
    return model, {**given, "timestep": torch.tensor([1, 2])}


def dit():
    model = diffusers.DiTTransformer2DModel(2, 8, 4, 4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10)
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2])}


def unet():
    model = diffusers.UNet2DConditionModel(
        8, 4, 4, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2, norm_num_groups=4, **BLOCKS
    )
    words = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return model, {"sample": torch.randn(2, 4, 8, 8), "timestep": 5, "encoder_hidden_states": torch.randn(2, 7, 16), "encoder_attention_mask": words}


def vae():
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4), {"sample": torch.randn(2, 3, 8, 8)}


MODELS = {"flux": flux, "sd3": sd3, "dit": dit, "unet": unet, "vae": vae}


@pytest.fixture(autouse=True)
def installed():
    before = _AttentionBackendRegistry._active_backend
    integration.install()
    yield
    integration.uninstall()
    assert _AttentionBackendRegistry._active_backend is before


def run(model, given):
    """(output, gradients of the parameters), and the decisions that were made."""
    model.zero_grad()
    with onchip.record() as decisions:
        out = model(**given).sample
        out.square().mean().backward()
    return (out.detach(), [p.grad for p in model.parameters()]), decisions


@pytest.mark.parametrize("name", MODELS)
def test_as_torchs_attention(name):
    torch.manual_seed(0)
    model, given = MODELS[name]()
    model.eval()
    theirs, none = run(model, given)
    integration.use(model)
    integration.use(model)
    ours, decisions = run(model, given)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert decisions and not none
    integration.unuse(model)
    assert not run(model, given)[1]


def test_the_backend_by_its_name():
    model, given = flux()
    theirs, _ = run(model, given)
    with attention_backend("onchip"):
        ours, decisions = run(model, given)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert decisions and not run(model, given)[1]
    model.set_attention_backend("onchip")
    assert run(model, given)[1]
    model.reset_attention_backend()


def test_arguments_of_a_call():
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    keys = torch.rand(2, 9) > 0.3
    for given in ({"attn_mask": keys}, {"attn_mask": torch.randn(2, 4, 5, 9)}, {"is_causal": True, "scale": 0.3}, {"attn_mask": torch.rand(2, 1, 5, 9) > 0.3}):
        theirs, ours = (dispatch_attention_fn(q, k, v, enable_gqa=True, backend=AttentionBackendName(name), **given) for name in ("native", "onchip"))
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="no context parallelism"):
        dispatch_attention_fn(q, k, v, enable_gqa=True, backend=AttentionBackendName("onchip"), parallel_config=object())


def test_processors_keep_their_signature_and_class():
    model = unet()[0]
    before = {name: (type(p), inspect.signature(p.__call__)) for name, p in model.attn_processors.items()}
    integration.use(model)
    for name, processor in model.attn_processors.items():
        kind, signature = before[name]
        assert isinstance(processor, kind) and type(processor) is not kind and inspect.signature(processor.__call__) == signature
    integration.unuse(model)
    assert all(type(p) is before[name][0] for name, p in model.attn_processors.items())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", ["use", "sdpa"])
def test_under_compile(way):
    torch.manual_seed(0)
    model, given = dit()
    expected = model.eval()(**given).sample
    torch._dynamo.reset()
    if way == "use":
        integration.use(model)
    with sdpa.installed() if way == "sdpa" else torch.no_grad(), torch.no_grad(), onchip.record() as decisions:
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(**given).sample, expected, atol=1e-5, rtol=1e-4)
    assert decisions


def test_the_name_is_there_and_goes_again():
    integration.install()
    assert AttentionBackendName("onchip") is AttentionBackendName.ONCHIP is AttentionBackendName["ONCHIP"] and "onchip" in list(AttentionBackendName)
    assert isinstance(AttentionBackendName.ONCHIP, str) and AttentionBackendName.ONCHIP.value == "onchip"
    integration.uninstall()
    assert "onchip" not in list(AttentionBackendName) and not hasattr(AttentionBackendName, "ONCHIP")
    assert "onchip" not in _AttentionBackendRegistry.list_backends()
    with pytest.raises(ValueError, match="onchip"):
        flux()[0].set_attention_backend("onchip")
    integration.uninstall()
