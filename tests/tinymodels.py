"""Real transformers models of a few thousand random weights, saved as any model is; their tokens are single bytes."""

import torch


def save(folder, kind="Llama", **changes):
    """Save a model of transformers' family ``kind`` (``Llama`` for LlamaForCausalLM) into ``folder``."""
    import transformers

    settings = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 640,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**(settings | changes))
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def begin_with(folder, letter):
    """Have a saved tokenizer put a token before every text, as Gemma's and Llama's do; return the folder."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    token = tokenizer.token_to_id(letter)
    tokenizer.post_processor = TemplateProcessing(single=f"{letter} $A", special_tokens=[(letter, token)])
    tokenizer.save(path)
    return folder


def save_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
