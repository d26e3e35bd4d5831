"""The real SmolLM2-135M-Instruct by its folder alone, against transformers; skipped where the folder is absent."""

import shutil

import torch
from torchtune.data import Message
from transformers import AutoModelForCausalLM, AutoTokenizer

import finch.models
from finch.weights.huggingface import HuggingFaceFolder

CONVERSATIONS = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name three birds.", "A robin, a wren and a heron.\nAll three live near my house."),
]


def test_tokens_logits_and_export_equal_transformers(smollm2, tmp_path):
    base, decoder = HuggingFaceFolder(str(smollm2)), finch.models.auto(str(smollm2), max_seq_len=256)
    base.check_model(decoder, "finch.models.auto")
    decoder.load_state_dict(dict(base.weights()))
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2), finch.models.auto_tokenizer(str(smollm2))
    for question, answer in CONVERSATIONS:
        messages = [Message(role="user", content=question, masked=True), Message(role="assistant", content=answer)]
        ids, mask = tokenizer.tokenize_messages(messages)
        plain = [{"role": message.role, "content": message.text_content} for message in messages]
        assert ids == AutoTokenizer.from_pretrained(smollm2).apply_chat_template(plain, return_dict=True)["input_ids"]
        kept = [token for token, masked in zip(ids, mask, strict=True) if not masked]
        assert tokenizer.decode(kept, skip_special_tokens=False) == f"{answer}<|im_end|>"
        tokens = torch.tensor([ids])
        with torch.no_grad():
            torch.testing.assert_close(decoder(tokens), reference(tokens).logits, rtol=0, atol=1e-4)
    try:
        base.write(decoder.state_dict().items(), tmp_path / "out", is_writer=True)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        assert exported.keys() == reference.state_dict().keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in reference.state_dict().items())
    finally:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)  # half a gigabyte
