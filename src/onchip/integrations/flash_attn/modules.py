"""`install`: the modules `flash_attn`, `flash_attn_interface` and `flash_attn.cute`, and their undo."""

import importlib

from onchip.integrations.standins import StandIns

HOME = "onchip.integrations.flash_attn"
FA2, FA3, FA4 = "2.8.4", "3.0.0", "4.0.0"  # the versions whose functions these are

MODULES = {  # name -> (our modules whose names it has, version)
    "flash_attn": (["fa2"], FA2),
    "flash_attn.flash_attn_interface": (["fa2", "fa2_private"], FA2),
    "flash_attn.bert_padding": (["bert_padding"], FA2),
    "flash_attn.layers": ([], FA2),
    "flash_attn.layers.rotary": (["rotary"], FA2),
    "flash_attn.ops": ([], FA2),
    "flash_attn.ops.triton": ([], FA2),
    "flash_attn.ops.triton.rotary": (["rotary"], FA2),
    "flash_attn_interface": (["fa3", "fa3_private"], FA3),
    "flash_attn_3": (["fa3", "fa3_private"], FA3),
    "flash_attn_3.flash_attn_interface": (["fa3", "fa3_private"], FA3),
    "flash_attn.cute": (["fa4"], FA4),
    "flash_attn.cute.interface": (["fa4", "fa4_private"], FA4),
}


def _operators():
    """Those of `torch.ops.flash_attn_3`."""
    return importlib.import_module(f"{HOME}.fa3_private").register()


STANDINS = StandIns(HOME, MODULES, _operators)
install, uninstall, installed = STANDINS.install, STANDINS.uninstall, STANDINS.installed
