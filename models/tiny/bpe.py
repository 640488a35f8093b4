"""The byte-level BPE tokenizer: 4096 entries, indentation and line ends as pieces of their own.

A prompt may end after a line end or after an indent and is still cut where the training text was cut.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS, EOS = "<|begin|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID = 0, 1

# Indent, word, number, punctuation, line ends, other blanks.
PIECES = r"(?<=\n)[ \t]+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer fitted on `texts`; special tokens hold the first ids and encoding puts BOS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer
