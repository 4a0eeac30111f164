"""trl fine-tunes a Llama, with activations that wait for backward on the host: two streams."""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def program(run: Any) -> None:
    length, batch = run.size(512, 16), run.size(8, 2)
    model = run.llama(1024, 8)
    words = {f"{number}": number for number in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "0")), pad_token="0", eos_token="1"
    )
    ids = torch.randint(2, model.config.vocab_size, (run.steps * batch, length)).tolist()

    class Trainer(SFTTrainer):
        def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
            loss = super().training_step(*given, **more)
            run.step(loss)
            return loss

    with tempfile.TemporaryDirectory() as folder:
        how = SFTConfig(
            folder, max_steps=run.steps, per_device_train_batch_size=batch, max_length=length,
            activation_offloading=not run.control, gradient_checkpointing=False,
            bf16=run.device == "cuda", use_cpu=run.device == "cpu", save_strategy="no",
            logging_steps=run.steps, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        data = Dataset.from_dict({"input_ids": ids})
        Trainer(model, how, train_dataset=data, processing_class=tokenizer).train()
