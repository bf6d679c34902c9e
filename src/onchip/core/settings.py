"""Every environment variable that onchip reads: name, type, default, what it does. `docs/settings.md` is made from this table."""

import os
from dataclasses import dataclass
from pathlib import Path

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Setting:
    """One environment variable; `read()` parses it anew each time, and a value that does not parse is an error."""

    name: str
    type: type
    default: object
    about: str

    def read(self):
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        if self.type is bool:
            if text.lower() not in TRUE + FALSE:
                raise ValueError(f"{self.name}={text!r} is not a truth value; use 1 or 0")
            return text.lower() in TRUE
        try:
            return self.type(text).expanduser() if self.type is Path else self.type(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r} is not a {self.type.__name__}") from None


STRICT = Setting("ONCHIP_STRICT", bool, False, "On a GPU, an automatic choice of a portable (plain torch) kernel is an error instead of a slow run.")
TRITON_CACHE = Setting(
    "TRITON_CACHE_DIR", Path, Path.home() / ".triton" / "cache", "Triton's own: where compiled kernels are kept; a first run on a GPU compiles a few seconds."
)
INTERPRET = Setting("TRITON_INTERPRET", bool, False, "Triton's own: run Triton kernels in its interpreter, so that a CPU counts as a GPU (slow; for tests).")
HF_HOME = Setting("HF_HOME", Path, Path.home() / ".cache" / "huggingface", "Hugging Face's own: where models named like owner/name are looked up.")
FA4_CACHE = Setting(
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    bool,
    False,
    "FlashAttention-4's own: its kernels stay on disk, so that `onchip bench` compiles them ahead.",
)
SM_MARGIN = Setting(
    "ONCHIP_SM_MARGIN",
    int,
    0,
    "Multiprocessors that Hopper's attention kernels and `register_decode` leave to others, communication above all; read when a problem first comes "
    "(`onchip.sm_margin` says it for some calls). A launch has as many programs less; those of two and more a multiprocessor lie where the GPU puts them. Not "
    "bound are Triton's own attention kernels and what is launched before and behind (statistics, turned copies, maps, merges): short programs, none of which "
    "waits for another one.",
)
COMMIT = Setting("GIT_COMMIT", str, "", "The commit that benchmark results name where git cannot say: in an exported tree.")

SETTINGS = (STRICT, SM_MARGIN, INTERPRET, TRITON_CACHE, HF_HOME, FA4_CACHE, COMMIT)


def of_child(**changed: str) -> dict[str, str]:
    """The environment of a process to be started, with some variables changed."""
    return {**os.environ, **changed}


def unless_set(name: str, value: str) -> None:
    """Set a variable that another library reads, where the user has not."""
    os.environ.setdefault(name, value)


def table() -> str:
    """The settings as a Markdown table."""
    rows = [f"| `{s.name}` | {s.type.__name__} | `{str(s.default).replace(str(Path.home()), '~')}` | {s.about} |" for s in SETTINGS]
    return "\n".join(["| variable | type | default | what it does |", "|---|---|---|---|", *rows])
