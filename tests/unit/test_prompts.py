"""Data order, chat templates, and the text that rewards see."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from twofold.step.prompts import PromptSource, decode_completion, encode_prompt
from twofold.types import Prompt

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant{% endif %}"
)
WORDS = ["<unk>", "<s>", "</s>", "user", "system", "assistant", "hello", "be", "brief", "5"]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a word; adds <s> by itself, as Llama's tokenizers do."""
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


HELLO = Prompt([{"role": "user", "content": "hello"}])


def test_chat_prompts_go_through_the_template_without_further_special_tokens():
    assert words(encode_prompt(HELLO, tokenizer(TEMPLATE))) == "<s> user hello </s> <s> assistant"


def test_the_system_prompt_is_put_where_there_is_none():
    fast = tokenizer(TEMPLATE)
    ids = encode_prompt(HELLO, fast, system_prompt="be brief")
    assert words(ids) == "<s> system be brief </s> <s> user hello </s> <s> assistant"
    own = Prompt([{"role": "system", "content": "be"}, *HELLO.content])
    assert encode_prompt(own, fast, "be brief") == encode_prompt(own, fast)
    assert len(HELLO.content) == 1  # the prompt itself is as it was


def test_text_prompts_get_the_tokenizers_own_special_tokens():
    ids = encode_prompt(Prompt("hello 5"), tokenizer(None), system_prompt="be brief")
    assert words(ids) == "<s> hello 5"


def test_chat_prompts_need_a_template():
    with pytest.raises(ValueError, match=r"model\.name: .* no chat template") as caught:
        encode_prompt(HELLO, tokenizer(None))
    assert "\n" not in str(caught.value)


def test_the_end_token_is_not_part_of_the_text():
    fast = tokenizer(None)
    assert decode_completion(fast, [6, 9, 2], stop_ids=(2,)) == "hello 5"
    assert decode_completion(fast, [6, 9], stop_ids=(2,)) == "hello 5"  # cut off by length
    assert decode_completion(fast, [6, 9, 7], stop_ids=(2, 7)) == "hello 5"
    assert decode_completion(fast, [2], stop_ids=(2,)) == ""
    assert decode_completion(fast, [], stop_ids=(2,)) == ""


def prompts(n: int) -> list[Prompt]:
    return [Prompt(str(i)) for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 7, 57])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_prompt_once_an_epoch_in_another_order(n, seed):
    source = PromptSource(prompts(n), seed)
    epochs = [[int(source.prompt(e * n + i).content) for i in range(n)] for e in range(4)]
    for order in epochs:
        assert sorted(order) == list(range(n)), f"seed {seed}"
    if n > 2:
        assert len({tuple(order) for order in epochs}) > 1, f"seed {seed}"


def test_the_prompt_of_a_group_depends_on_nothing_else():
    ids = [0, 56, 57, 113, 114, 5, 171, 1000, 3]
    straight, other_seed = PromptSource(prompts(57), 3), PromptSource(prompts(57), 4)
    expected = {g: straight.prompt(g) for g in range(1001)}
    backwards = PromptSource(prompts(57), 3)
    assert all(backwards.prompt(g) == expected[g] for g in [*ids, *reversed(ids)])
    assert any(other_seed.prompt(g) != expected[g] for g in range(57))
    # fixed for good: a resumed run continues an older process's order
    assert [int(straight.prompt(g).content) for g in range(6)] == [40, 21, 26, 37, 32, 55]


def test_no_prompts():
    with pytest.raises(ValueError, match="no prompts to train on"):
        PromptSource([], 0)
