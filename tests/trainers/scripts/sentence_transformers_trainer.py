"""SentenceTransformerTrainer on a small BERT; `--half` makes the weights bfloat16."""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

torch.manual_seed(0)
words = [first + second for first in "abcdef" for second in "abcdef"]
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=41, intermediate_size=64, **sizes, **no_dropout)
with tempfile.TemporaryDirectory() as folder:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    Path(folder, "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(f"{folder}/vocab.txt").save_pretrained(folder)
    BertModel(config).save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(folder), Pooling(32)], device="cpu")
if "--half" in sys.argv:
    model = model.bfloat16()
picks = torch.randint(36, (320, 4), generator=torch.Generator().manual_seed(1)).tolist()
rows = [(" ".join(words[k] for k in pick), " ".join(words[k - 7] for k in pick)) for pick in picks]
with tempfile.TemporaryDirectory() as folder:
    arguments = SentenceTransformerTrainingArguments(
        folder,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    data = Dataset.from_dict(
        dict(zip(("anchor", "positive"), zip(*rows, strict=True), strict=True))
    )
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)
    trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print({"loss": float(row["loss"])})
