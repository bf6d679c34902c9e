"""`install`: the modules `flashinfer` and `flash_mla`, and their undo."""

from onchip.integrations.standins import StandIns

HOME = "onchip.integrations.flashinfer"
FLASHINFER, FLASHMLA = "0.7.2", "1.0.0"  # the versions whose functions these are

MODULES = {  # name -> (our modules whose names it has, version)
    "flashinfer": (["functions"], FLASHINFER),
    "flashinfer.activation": (["activation"], FLASHINFER),
    "flashinfer.attention": (["attention"], FLASHINFER),
    "flashinfer.cascade": (["cascade"], FLASHINFER),
    "flashinfer.decode": (["decode", "single"], FLASHINFER),
    "flashinfer.mla": (["mla"], FLASHINFER),
    "flashinfer.norm": (["norm"], FLASHINFER),
    "flashinfer.page": (["page"], FLASHINFER),
    "flashinfer.prefill": (["prefill", "ragged", "single"], FLASHINFER),
    "flashinfer.quantization": (["quantization"], FLASHINFER),
    "flashinfer.rope": (["rope"], FLASHINFER),
    "flashinfer.utils": (["device"], FLASHINFER),
    "flash_mla": (["flash_mla"], FLASHMLA),
    "flash_mla.flash_mla_interface": (["flash_mla"], FLASHMLA),
}

STANDINS = StandIns(HOME, MODULES)
install, uninstall, installed = STANDINS.install, STANDINS.uninstall, STANDINS.installed
