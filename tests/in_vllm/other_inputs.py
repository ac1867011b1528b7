"""Requests with inputs besides tokens: LoRA adapters, pictures, and prompts given as embeddings.

Each function serves them in two rounds, without kvsm and with it. The device's cache is emptied after each
round. The functions run in the process of a `Stage`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_stage import HOST_BYTES, Answer, Server, conversations, engine_of
from model_zoo import TinyModel

from kvsm.vllm.tiny_model import VOCABULARY
from kvsm.vllm.trial import connector_config

PLAIN, KVSM = "without kvsm", "KvsmConnector"


def serve_adapters(model: TinyModel, directory: Path) -> dict[str, list[list[Answer]]]:
    """The answers to two prompts without an adapter and with each of two, in two rounds.

    Returns them by `PLAIN` and `KVSM`. directory: where the event log lies.
    """
    from vllm.lora.request import LoRARequest

    prompts = conversations()[:2]
    adapters = [None]
    for number in (1, 2):
        path = directory / f"adapter {number}"
        _write_adapter(path, model, seed=number)
        adapters.append(LoRARequest(path.name, number, str(path)))
    transfer = connector_config(cpu_bytes_to_use=HOST_BYTES, event_log=str(directory / "log"))
    answers: dict[str, list[list[Answer]]] = {}
    for name, config in ((PLAIN, None), (KVSM, transfer)):
        with engine_of(model, config, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
            server, answers[name] = Server(llm), []
            for _ in range(2):
                answers[name] += [server.ask(prompts, adapter) for adapter in adapters]
                server.forget()
    return answers


def _write_adapter(path: Path, model: TinyModel, seed: int) -> None:
    """A LoRA adapter of the queries and values of each layer, as PEFT writes it."""
    import torch
    from safetensors.torch import save_file

    config, rank = model.config, 8
    drawn = torch.Generator().manual_seed(seed)
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, number in heads.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shape = number * config["head_dim"], rank
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, config["hidden_size"], generator=drawn) / 8
            weights[f"{prefix}.lora_B.weight"] = torch.randn(shape, generator=drawn) / 8
    path.mkdir()
    save_file(weights, str(path / "adapter_model.safetensors"))
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": [*heads], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(adapter))


def serve_pictures(config: Mapping[str, Any], directory: Path) -> dict[str, list[list[Answer]]]:
    """The answers to one text with each of three pictures, one after the other, in two rounds.

    Returns them by `PLAIN` and `KVSM`. directory: where the event log lies.
    """
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(1)
    pictures = [Image.fromarray(drawn.integers(0, 255, (28, 28, 3), dtype=np.uint8)) for _ in range(3)]
    text = conversations()[0]
    asked = [{"prompt_token_ids": text, "multi_modal_data": {"image": picture}} for picture in pictures]
    transfer = connector_config(cpu_bytes_to_use=HOST_BYTES, event_log=str(directory / "log"))
    _write_processor(directory, config)
    answers: dict[str, list[list[Answer]]] = {}
    for name, given in ((PLAIN, None), (KVSM, transfer)):
        model = TinyModel(config)
        more = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
        with engine_of(model, given, str(directory), **more) as llm:
            server, answers[name] = Server(llm), []
            for _ in range(2):
                answers[name].append([answer for one in asked for answer in server.ask([one])])
                server.forget()
    return answers


def _write_processor(directory: Path, config: Mapping[str, Any]) -> None:
    """Write an image processor, and the tokenizer that vLLM needs for it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import Blip2Processor, BlipImageProcessor, PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    words = [*special, *(f"w{number}" for number in range(len(special), VOCABULARY))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    side = config["vision_config"]["image_size"]
    pixels = BlipImageProcessor(size={"height": side, "width": side})
    Blip2Processor(pixels, tokenizer, num_query_tokens=config["num_query_tokens"]).save_pretrained(directory)


def serve_embeddings(model: TinyModel, directory: Path) -> dict[str, list[list[Answer]]]:
    """The answers to two prompts that are embeddings, in two rounds.

    Returns them by `PLAIN` and `KVSM`. directory: where the event log lies.
    """
    import torch

    drawn = torch.Generator().manual_seed(1)
    asked = [
        {"prompt_embeds": torch.randn(length, model.config["hidden_size"], generator=drawn)}
        for length in (150, 100)
    ]
    transfer = connector_config(cpu_bytes_to_use=HOST_BYTES, event_log=str(directory / "log"))
    answers: dict[str, list[list[Answer]]] = {}
    for name, given in ((PLAIN, None), (KVSM, transfer)):
        with engine_of(model, given, enable_prompt_embeds=True) as llm:
            server, answers[name] = Server(llm), []
            for _ in range(2):
                answers[name].append([answer for one in asked for answer in server.ask([one])])
                server.forget()
    return answers
