"""The model of examples/bert: small with random weights, or one that transformers loads."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bert_data import PADDING, word_tokenizer
from torch import nn
from transformers import AutoModelForSequenceClassification as AutoModel
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification


def tokenizer(
    texts: list[str], args: argparse.Namespace
) -> tuple[Callable[[str], list[int]], int, int]:
    """Return what turns a text into numbers, how many numbers there are, and that of padding."""
    if args.model_path is None:
        return *word_tokenizer(texts, args.max_seq_len), PADDING
    try:
        loaded = AutoTokenizer.from_pretrained(args.model_path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--model_path {args.model_path}: transformers finds no tokenizer there ({reason}); it "
            "must be a folder that save_pretrained wrote, or a name such as bert-base-uncased"
        ) from error

    def encode(text: str) -> list[int]:
        return loaded(text, truncation=True, max_length=args.max_seq_len)["input_ids"]

    return encode, len(loaded), loaded.pad_token_id


def build_model(vocabulary: int, classes: int, args: argparse.Namespace) -> nn.Module:
    if args.model_path is not None:
        return AutoModel.from_pretrained(
            args.model_path, num_labels=classes, ignore_mismatched_sizes=True
        )
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=2,
        intermediate_size=2 * args.hidden_size,
        max_position_embeddings=args.max_seq_len,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        num_labels=classes,
    )
    return BertForSequenceClassification(config)
