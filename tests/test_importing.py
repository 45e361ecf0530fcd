"""Import of users' files: formats, end tokens, what is left out, what is rejected."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, Recorder, rejected
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import train
from topr.policy import Policy, export_policy, load_policy, load_tokenizer
from topr.run.identity import policy_hash
from topr.trajectories import read_metadata, read_trajectories
from topr.trajectories.__main__ import main

EOS, BOS, END = 1, 2, 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "[{{ m['role'] }}{% if m.name is defined %} {{ m.name }}{% endif %}]\n"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
    "{{ m['content'] }}<end>\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
ASK, SAY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM, WRONG = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "five"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A random Llama whose tokenizer and chat template both write a BOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<pad>", "<eos>", "<bos>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["[user]\n[assistant]\nthe answer is four, not five"] * 9, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=280, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=96, initializer_range=0.3,
        pad_token_id=0, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [EOS, END]
    folder = tmp_path_factory.mktemp("chat") / "policy"
    export_policy(Policy(model, tokenizer, str(folder)), folder)
    return folder


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(run, policy, rows, *arguments):
    """Trajectories of an import that must succeed, and what it printed."""
    source = rows if not isinstance(rows, list) else jsonl(run.folder / "a.jsonl", rows)
    files = f"--policy={policy}", "--out=a.parquet", "--overwrite=true"
    code, out, err = run(main, "import", source, *arguments, *files)
    assert code == 0, err
    return read_trajectories(run.folder / "a.parquet"), out


def expected_ids(tokenizer, prompt) -> list[int]:
    """Of a prompt, in the way of the tokenizer's own documentation."""
    if isinstance(prompt, str):
        return [BOS, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    return tokenizer.apply_chat_template(
        prompt, tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]


PLAIN = {"prompt": "2+2=", "response": "4", "reward": 1}
CONVERSATION = {"messages": [SYSTEM, ASK, SAY], "reward": -0.5}
PAIR = {"chosen": [SYSTEM, ASK, SAY], "rejected": [SYSTEM, ASK, WRONG]}
TEXT = {"input": "2+2=", "output": "4"}
BOTH = [([SYSTEM, ASK], "4", 1), ([SYSTEM, ASK], "five", -1)]
CASES = {  # a row, and the prompts, responses and rewards that it gives
    "chat prompt": (PLAIN | {"prompt": [ASK], "reward": True}, [([ASK], "4", 1)]),
    "conversation": (CONVERSATION, [([SYSTEM, ASK], "4", -0.5)]),
    "TRL unpaired": ({"prompt": "2", "completion": " 4", "label": False}, [("2", " 4", -1)]),
    "TRL paired": (
        {"prompt": "2+2=", "chosen": "4", "rejected": "five"},
        [("2+2=", "4", 1), ("2+2=", "five", -1)],
    ),
    "TRL chat": ({"prompt": [SYSTEM, ASK], "chosen": [SAY], "rejected": [WRONG]}, BOTH),
    "TRL implicit prompt": (PAIR, BOTH),
    "TRL, several turns": (
        {"chosen": [ASK, WRONG, ASK, SAY], "rejected": [ASK, WRONG, ASK, WRONG]},
        [([ASK, WRONG, ASK], "4", 1), ([ASK, WRONG, ASK], "five", -1)],
    ),
    "question beside conversations": (PAIR | {"prompt": "2+2?"}, BOTH),
    "verl": (TEXT | {"gts": "4", "score": 1.0}, [("2+2=", "4", 1)]),
    "OpenRLHF": (TEXT | {"reward": -1.25}, [("2+2=", "4", -1.25)]),
    "names of two formats": (PLAIN | {"label": False, "score": 3}, [("2+2=", "4", 1)]),
}


def check_scores(policy, t) -> None:
    """Compare log mu with the model's own log-probs; 0 where a token was not sampled."""
    model = load_policy(str(policy)).model
    ids = torch.tensor([t.prompt_ids + t.response_ids])
    log_probs = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = log_probs[range(len(t.response_ids)), t.response_ids]
    if t.sampled is not None:
        expected = expected * torch.tensor(t.sampled)
    np.testing.assert_allclose(t.ref_logprobs, expected.detach(), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_every_format_gives_its_prompts_responses_and_rewards(run, chat, case):
    row, expected = CASES[case]
    trajectories, _ = imported(run, chat, [row])
    assert [(t.response, t.reward) for t in trajectories] == [case[1:] for case in expected]
    assert len({(t.group, t.prompt_id) for t in trajectories}) == 1
    tokenizer = load_tokenizer(str(chat))
    for t, (prompt, response, _) in zip(trajectories, expected, strict=True):
        assert t.prompt_ids == expected_ids(tokenizer, prompt)
        assert t.prompt_ids.count(BOS) == 1 and t.gold == row.get("gts") and t.finished
        end = EOS if isinstance(prompt, str) else END  # the template writes the latter
        assert t.response_ids == [*tokenizer(response, add_special_tokens=False)["input_ids"], end]
        check_scores(chat, t)


@pytest.mark.parametrize(
    ("response", "finished", "added"),
    [("4", True, [EOS]), ("4<end>", True, []), ("4", False, []), ("", True, [EOS])],
)
def test_a_finished_response_has_one_end_token(run, chat, response, finished, added):
    (t,), _ = imported(run, chat, [PLAIN | {"response": response, "finished": finished}])
    ids = load_tokenizer(str(chat))(response, add_special_tokens=False)["input_ids"]
    assert t.response_ids == ids + added and t.finished is finished


def test_a_rendered_prompt_gets_no_second_bos(run, chat):
    tokenizer = load_tokenizer(str(chat))
    text = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    (t,), _ = imported(run, chat, [PLAIN | {"prompt": text}])
    assert t.prompt_ids == expected_ids(tokenizer, [ASK]) and t.prompt_ids.count(BOS) == 1


def test_rows_of_one_prompt_form_a_group(run, tmp_path, policy):
    row = {"prompt": "1+2>", "response": "1+2=3;#3", "reward": 1}
    rows = [row, row | {"gold": 3, "finished": False}, row | {"prompt": "2+2>"}]
    (first, second, third), _ = imported(run, policy, rows)
    assert first.prompt_id == first.group == second.group != third.group
    assert (second.finished, second.gold, third.gold) == (False, "3", None)
    assert read_metadata(tmp_path / "a.parquet")["policy"] == policy_hash(str(policy))


def test_parquet_and_json_lines_are_the_same(run, tmp_path, chat):
    """Parquet writes null for every key that another row or message has."""
    named = [SYSTEM, ASK | {"name": "ann"}]
    rows = [
        {"prompt": named, "response": [SAY], "reward": 1.0, "gold": "4"},
        {"prompt": [ASK], "response": [WRONG], "reward": -1.0},
        {"chosen": [ASK, SAY | {"name": "bot"}], "rejected": [ASK, WRONG]},
    ]
    lines, _ = imported(run, chat, rows)
    schema = pa.unify_schemas([pa.Table.from_pylist([row]).schema for row in rows])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "b.parquet")
    assert imported(run, chat, tmp_path / "b.parquet")[0] == lines


def test_the_precision_of_training_can_score(run, tmp_path, policy):
    (exact,), _ = imported(run, policy, [PLAIN])
    (rough,), _ = imported(run, policy, [PLAIN], "--precision=bf16-mixed")
    assert 0 < np.abs(np.subtract(rough.ref_logprobs, exact.ref_logprobs)).max() < 0.05
    assert read_metadata(tmp_path / "a.parquet")["precision"] == "bf16-mixed"


def test_overlong_trajectories_are_left_out_and_counted(run, policy):
    # 64 tokens with the end
    rows = [{"prompt": "1>", "response": "1" * length, "reward": 1} for length in (61, 62, 3)]
    trajectories, out = imported(run, policy, rows)
    assert [len(t.response_ids) for t in trajectories] == [62, 4]
    assert "left out as too long: 1" in out
    arguments = ["a.jsonl", f"--policy={policy}", "--out=b.parquet", "--microbatch_tokens=4"]
    rejected(run, "no row fits into 4 tokens", "import", *arguments, main=main)


def test_several_files_are_imported_as_one(run, tmp_path, policy):
    rows = [PLAIN | {"response": str(i)} for i in range(4)]
    jsonl(tmp_path / "b-1.jsonl", rows[:1])
    jsonl(tmp_path / "b-2.jsonl", rows[1:2])
    pq.write_table(pa.Table.from_pylist(rows[2:]), tmp_path / "c.parquet")
    parts, _ = imported(run, policy, "b-*", "c.parquet")
    assert [t.response for t in parts] == list("0123")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "2, 2"}}]
RATED = {"Rating": "4", "Rationale": "Fine."}
QUESTION, BRIEF = [ASK], [SYSTEM, ASK]


def openhands_turn(role, content, **more) -> dict:
    """A message of OpenHands, with all its keys."""
    keys = ("function_call", "name", "tool_call_id", "tool_calls")
    return {"role": role, "content": content} | dict.fromkeys(keys) | more


def swe_agent_turn(role, text, system_prompt=None) -> dict:
    keys = {"cutoff_date": None, "mask": role == "ai"}
    return keys | {"role": role, "text": text, "system_prompt": system_prompt}


AGENT = [
    openhands_turn("system", "be brief"),
    openhands_turn("user", "2+2?"),
    openhands_turn("assistant", "", tool_calls=CALLS),
    openhands_turn("tool", "4", name="add", tool_call_id="call_1"),
    openhands_turn("assistant", "4"),
]
AGENT_RESPONSE = "add(2, 2)<end>\n[tool add]\n4<end>\n[assistant]\n4<end>"
# Of a data set of configs/import/ a row with all of its columns, changes that make the second row,
# and the prompts, responses and rewards of both
SHAPES: dict[str, tuple] = {
    "OpenMathInstruct-1": (
        {
            "question": "2+2?", "expected_answer": "4", "predicted_answer": "4",
            "error_message": "<not_executed>", "is_correct": True, "dataset": "gsm8k",
            "generation_type": "without_reference_solution", "generated_solution": "4",
        },
        {"generated_solution": "five", "is_correct": False},
        [("2+2?", "4", 1), ("2+2?", "five", -1)],
    ),
    "OpenThoughts-114k-math": (
        {
            "source": "olympiads", "problem": "2+2?", "solution": "It is 4.",
            "messages": [ASK, WRONG], "system": "be brief", "generated_token_count": 1,
            "conversations": [
                {"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"},
            ],
            "correct": True,
        },
        {"correct": False},
        [(BRIEF, "4", 1), (BRIEF, "4", -1)],
    ),
    "OpenR1-Math-220k": (
        {
            "problem": "2+2?", "solution": "It is 4.", "answer": "4", "problem_type": "Algebra",
            "question_type": "math-word-problem", "source": "olympiads", "uuid": "u1",
            "is_reasoning_complete": [True, True], "generations": ["4", "five"],
            "correctness_math_verify": [True, False], "correctness_llama": None,
            "finish_reasons": ["stop", "stop"], "correctness_count": 1, "messages": [ASK, SAY],
        },
        {"generations": ["44"], "correctness_math_verify": [False]},
        [("2+2?", "4", 1), ("2+2?", "five", -1), ("2+2?", "44", -1)],
    ),
    "UltraFeedback": (
        {
            "source": "sharegpt", "instruction": "2+2?", "models": ["gpt-4", "starchat"],
            "completions": [
                {
                    "annotations": {"helpfulness": RATED, "honesty": RATED}, "critique": "Good.",
                    "custom_system_prompt": "Be helpful.", "fine-grained_score": 4.75,
                    "model": "gpt-4", "overall_score": 10.0, "principle": "helpfulness",
                    "response": "4",
                },
                {
                    "annotations": {"helpfulness": RATED, "honesty": RATED}, "critique": "Bad.",
                    "custom_system_prompt": "Be honest.", "fine-grained_score": 1.5,
                    "model": "starchat", "overall_score": 1.0, "principle": "honesty",
                    "response": "five",
                },
            ],
            "correct_answers": ["None"], "incorrect_answers": ["None"],
        },
        {"models": [], "completions": []},
        [("2+2?", "4", 1), ("2+2?", "five", -1)],
    ),
    "HelpSteer2": (
        {
            "prompt": "2+2?", "response": "4", "helpfulness": 3, "correctness": 4, "coherence": 4,
            "complexity": 1, "verbosity": 0,
        },
        {"response": "five", "helpfulness": 0},
        [("2+2?", "4", 0.5), ("2+2?", "five", -1)],
    ),
    "HelpSteer3": (
        {
            "domain": "stem", "language": "english", "context": [SYSTEM, ASK], "response1": "4",
            "response2": "five", "overall_preference": -3,
            "individual_preference": [
                {"score": -3, "reasoning": "4 is right", "feedback1": "", "feedback2": ""}
            ],
        },
        {"response1": "five", "response2": "4", "overall_preference": 0},
        [(BRIEF, "4", 1), (BRIEF, "five", -1), (BRIEF, "five", 0), (BRIEF, "4", 0)],
    ),
    "Nectar": (
        {
            "prompt": "\n\nHuman: 2+2?\n\nAssistant: ", "turns": 1, "num_responses": 7,
            "answers": [
                {"answer": "4", "model": "gpt-4", "rank": 1.0},
                {"answer": "four", "model": "llama", "rank": 4.0},
                {"answer": "five", "model": "mistral", "rank": 7.0},
            ],
            "source": ["flan"], "good_natured": True,
        },
        {"answers": [{"answer": "44", "model": "gpt-4", "rank": 1.0}]},
        [("\n\nHuman: 2+2?\n\nAssistant: ", *pair) for pair in
         (("4", 1), ("four", 0), ("five", -1), ("44", 1))],
    ),
    "UltraInteract_pair": (
        {
            "task": "Math_CoT", "dataset": "gsm8k",
            "trajectory": [{"from": "user", "value": "2+2?"}],
            "chosen": "4", "rejected": "five", "id": "d1_0", "parent_id": "d1",
        },
        {
            "trajectory": [
                {"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "five"},
                {"from": "user", "value": "No."},
            ]
        },
        [(QUESTION, "4", 1), (QUESTION, "five", -1)]
        + [([ASK, WRONG, ASK | {"content": "No."}], *pair) for pair in (("4", 1), ("five", -1))],
    ),
    "orca_dpo_pairs": (
        {"system": "be brief", "question": "2+2?", "chosen": "4", "rejected": "five"},
        {"system": ""},
        [*BOTH, (QUESTION, "4", 1), (QUESTION, "five", -1)],
    ),
    "OpenHands-Sampled-Trajectories": (
        {
            "instance_id": "python__mypy-1", "run_id": "gpt-4o_maxiter_50", "resolved": True,
            "messages": AGENT, "tools": TOOLS,
            "test_result": {"git_patch": "", "report": {"resolved": True}, "test_output": ""},
        },
        {"resolved": False},
        [(BRIEF, AGENT_RESPONSE, 1), (BRIEF, AGENT_RESPONSE, -1)],
    ),
    "SWE-rebench-openhands-trajectories": (
        {
            "trajectory_id": "chatcmpl-1", "instance_id": "a__b-1", "repo": "a/b",
            "trajectory": AGENT, "tools": TOOLS, "model_patch": "", "exit_status": "submit",
            "resolved": 1, "gen_tests_correct": None, "pred_passes_gen_tests": None,
        },
        {"resolved": 0, "gen_tests_correct": 0.0, "pred_passes_gen_tests": 1.0},
        [(BRIEF, AGENT_RESPONSE, 1), (BRIEF, AGENT_RESPONSE, -1)],
    ),
    "SWE-agent-trajectories": (
        {
            "instance_id": "a__b-1", "model_name": "swe-agent-llama-70b", "target": True,
            "trajectory": [
                swe_agent_turn("system", None, system_prompt="be brief"),
                swe_agent_turn("user", "2+2?"), swe_agent_turn("ai", "five"),
                swe_agent_turn("user", "No."), swe_agent_turn("ai", "4"),
            ],
            "exit_status": "submitted", "generated_patch": "", "eval_logs": "",
        },
        {"target": False},
        [(BRIEF, "five<end>\n[user]\nNo.<end>\n[assistant]\n4<end>", reward) for reward in (1, -1)],
    ),
}  # fmt: skip


def preset(name: str) -> str:
    return f"--config={ROOT / 'configs' / 'import' / name}.yaml"


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_give_their_prompts_responses_and_rewards(run, chat, name):
    row, changes, expected = SHAPES[name]
    trajectories, out = imported(run, chat, [row, row | changes], preset(name))
    tokenizer = load_tokenizer(str(chat))
    assert [(t.response, t.reward) for t in trajectories] == [case[1:] for case in expected]
    assert [t.prompt_ids for t in trajectories] == [
        expected_ids(tokenizer, prompt) for prompt, *_ in expected
    ]
    above = sum(reward > 0 for *_, reward in expected)
    assert f": {above} of {len(expected)} above 0" in out
    # Parquet writes null for every key that another row or record has
    pq.write_table(pa.Table.from_pylist([row, row | changes]), run.folder / "b.parquet")
    assert imported(run, chat, run.folder / "b.parquet", preset(name))[0] == trajectories


def test_every_preset_is_tested():
    names = {path.stem for path in (ROOT / "configs" / "import").glob("*.yaml")}
    assert names == SHAPES.keys() | TOKEN_SHAPES.keys()


def test_imported_pairs_train(run, chat):
    """A data set of the hub goes from its own columns to an update."""
    row, changes, _ = SHAPES["UltraInteract_pair"]
    imported(run, chat, [row, row | changes], preset("UltraInteract_pair"))
    fit(run, chat)


def fit(run, policy) -> dict:
    """Train one update on a.parquet, and return what it did to each trajectory."""
    Recorder.clear()
    config = ["--config", ROOT / "configs" / "arithmetic.yaml", "--data.train=a.parquet"]
    config += [f"--model.policy={policy}", "--data.val=null", "--data.test=null"]
    config += ["--trainer.max_steps=1", "--trainer.callbacks+=conftest.Recorder"]
    code, out, err = run(train.main, "fit", *config)
    assert code == 0, err
    (columns,) = Recorder.rows
    return columns


@pytest.mark.parametrize(
    ("options", "rewards", "words"),
    [
        ([], [1, 7, 10], "threshold None, scale None: 3 of 3"),
        (["--threshold=7"], [-1, 1, 1], "threshold 7.0, scale None: 2 of 3"),
        (["--scale", "1", "13"], [-1, 0, 0.5], "threshold None, scale [1.0, 13.0]: 1 of 3"),
        (["--scale", "10", "1", "--threshold=8"], [-1, -1, 1], "threshold 8.0, scale"),
        (["--scale", "10", "1"], [1, -1 / 3, -1], "scale [10.0, 1.0]: 1 of 3"),
    ],
)
def test_rewards_of_any_range_are_converted_and_stated_back(run, chat, options, rewards, words):
    rows = [PLAIN | {"reward": reward} for reward in (1, "7", 10.0)]
    trajectories, out = imported(run, chat, rows, *options)
    assert [t.reward for t in trajectories] == pytest.approx(rewards)
    assert words in out


def test_options_override_a_preset(run, chat):
    row, *_ = SHAPES["UltraFeedback"]
    options = ["--response=completions.model", "--scale", "1", "19"]
    trajectories, _ = imported(run, chat, [row], preset("UltraFeedback"), *options)
    assert [(t.response, t.reward) for t in trajectories] == [("gpt-4", 0), ("starchat", -1)]
    choice = "--reward=completions['fine-grained_score']"
    trajectories, _ = imported(run, chat, [row], preset("UltraFeedback"), choice, "--threshold=2")
    assert [t.reward for t in trajectories] == [1, -1]


@pytest.mark.parametrize("ends", [["stop", "length"], [True, False], [1, 0]])
def test_a_field_that_says_why_a_response_ended_decides_its_end_token(run, chat, ends):
    (done, cut), _ = imported(run, chat, [MANY | {"ends": ends}], "--finished=ends")
    assert (done.finished, done.response_ids[-1]) == (True, EOS)
    assert not cut.finished and cut.response_ids[-1] != EOS


# "2+2=", then "4,," and "ou": the tokenizer has a token for "ou", which was sampled in two
SPLIT_IDS = [[BOS, 21, 14, 21, 32], [23, 15, 15, EOS], [82, 88]]
LOG_PROBS = [[-1.5, -2.0, -0.5, 0.0], [-3.0, -1.0]]
TOKEN_SHAPES = {
    "open-instruct": [
        {
            "step": 1, "sample_idx": i, "prompt_idx": 0, "prompt_tokens": SPLIT_IDS[0],
            "response_tokens": SPLIT_IDS[1 + i], "reward": float(i), "advantage": 0.5,
            "finish_reason": ["stop", "length"][i], "dataset": "math", "ground_truth": [20],
            "request_info": {"num_calls": 0, "tool_errors": ""}, "logprobs": LOG_PROBS[i],
        }
        for i in range(2)
    ],
    "vllm-chat": [
        {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy",
            "choices": [
                {
                    "index": i, "message": {"role": "assistant", "content": "four"},
                    "logprobs": {
                        "content": [
                            {"token": "f", "logprob": value, "bytes": [1], "top_logprobs": []}
                            for value in LOG_PROBS[i]
                        ]
                    },
                    "finish_reason": ["stop", "length"][i], "stop_reason": None,
                    "token_ids": SPLIT_IDS[1 + i], "reward": float(i),
                }
                for i in range(2)
            ],
            "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
            "prompt_logprobs": None, "prompt_token_ids": SPLIT_IDS[0],
        }
    ],
}  # fmt: skip
TOKEN_ROWS: list[dict] = [
    {"prompt_ids": SPLIT_IDS[0], "response_ids": ids, "logprobs": logprobs, "reward": reward}
    for ids, logprobs, reward in zip(SPLIT_IDS[1:], LOG_PROBS, (0.0, 1.0), strict=True)
]


@pytest.mark.parametrize("name", [None, *TOKEN_SHAPES])
@pytest.mark.parametrize("log_mu", ["rescored", "stored"])
def test_token_ids_stay_as_sampled_and_log_mu_is_chosen(run, chat, name, log_mu):
    rows, options = TOKEN_SHAPES.get(name, TOKEN_ROWS), [preset(name)] if name else []
    trajectories, _ = imported(run, chat, rows, *options, f"--log_mu={log_mu}")
    assert [t.response_ids for t in trajectories] == SPLIT_IDS[1:]
    assert [t.prompt_ids for t in trajectories] == [SPLIT_IDS[0]] * 2
    assert [(t.finished, t.reward) for t in trajectories] == [(True, 0), (False, 1)]
    assert len({t.group for t in trajectories}) == 1
    tokenizer = load_tokenizer(str(chat))
    assert tokenizer("ou", add_special_tokens=False)["input_ids"] == [268]
    assert [t.response for t in trajectories] == ["4,,<eos>", "ou"]
    for t, logprobs in zip(trajectories, LOG_PROBS, strict=True):
        if log_mu == "stored":
            assert t.ref_logprobs == logprobs
        else:
            check_scores(chat, t)
    named = read_metadata(run.folder / "a.parquet")["policy"]
    assert named == (None if log_mu == "stored" else policy_hash(str(chat)))


def test_the_difference_of_stored_log_probs_is_reported_and_trained_if_asked_for(run, chat):
    text_row = PLAIN | {"logprobs": [-1.0]}  # of tokens that nobody knows
    without = [row | {"logprobs": None} for row in TOKEN_ROWS]
    (*scored, _), out = imported(run, chat, [*without, text_row])
    assert "stored" not in out
    gaps = [[-0.5, 0.25, 0.0, -0.25], [-1.0, 0.0]]
    rows = [
        row | {"logprobs": np.add(t.ref_logprobs, gap).tolist()}
        for row, t, gap in zip(TOKEN_ROWS, scored, gaps, strict=True)
    ]
    # of six tokens 2 in all, of two sequences 0.5 and 1
    words = "log mu: 0.333 a token, 0.75 a sequence;"
    for log_mu, start in (("rescored", [0, 0]), ("stored", [0.5, 1])):
        _, out = imported(run, chat, rows, f"--log_mu={log_mu}")
        assert words in out
        np.testing.assert_allclose(fit(run, chat)["log_ratio"], start, atol=1e-4)


TOOL = {"role": "tool", "content": "4"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "2, 2"}}]}


@pytest.mark.parametrize("finished", [True, False])
def test_every_assistant_message_of_a_conversation_was_sampled_with_its_end_token(
    run, chat, finished
):
    last = SAY | {"content": "4\n"}  # a cut response may end in a line break
    messages = [ASK, CALL, TOOL, SAY, ASK, last]
    (t,), _ = imported(run, chat, [{"messages": messages, "reward": 1, "finished": finished}])
    tokenizer = load_tokenizer(str(chat))
    assert t.prompt_ids == expected_ids(tokenizer, [ASK])
    ids = np.array(t.response_ids)
    parts = np.split(ids, np.flatnonzero(np.diff(t.sampled)) + 1)  # sampled and not, in turn
    assert t.sampled[0] and t.finished == finished and t.response == tokenizer.decode(ids)
    assert tokenizer.batch_decode(parts) == [
        "add(2, 2)<end>",
        "\n[tool]\n4<end>\n[assistant]\n",
        "4<end>",
        "\n[user]\n2+2?<end>\n[assistant]\n",
        "4\n<end>" if finished else "4\n",
    ]
    check_scores(chat, t)


@pytest.mark.parametrize(
    ("old", "new"),
    [("{{ m['content'] }}", "{{ m.content if loop.last or m.role == 'user' }}"), ("<end>", "")],
)
def test_a_template_must_keep_earlier_turns_and_end_each(run, chat, tmp_path, old, new):
    shutil.copytree(chat, tmp_path / "policy")
    (tmp_path / "policy" / "chat_template.jinja").write_text(TEMPLATE.replace(old, new))
    jsonl(tmp_path / "a.jsonl", [{"messages": [ASK, WRONG, ASK, SAY], "reward": 1}])
    arguments = ["import", "a.jsonl", "--policy=policy", "--out=a.parquet"]
    rejected(run, "the chat template changes earlier turns", *arguments, main=main)


MANY = {"prompt": "2+2=", "response": ["4", "five"], "reward": [True, False]}
IDS = {"prompt_ids": [BOS, 70], "response_ids": [71, EOS], "logprobs": [-1.0, -2.0], "reward": 1}
MALFORMED = {  # a row that is accepted, the changes that make it bad, words of the error
    "no reward": (PLAIN, {"reward": None}, "found the keys prompt, response; expected prompt"),
    "prompt": (PLAIN, {"prompt": 1}, "chat messages do not fit"),
    "no prompt": (CONVERSATION, {"messages": [SAY]}, "chat messages do not fit"),
    "no answer": (CONVERSATION, {"messages": [ASK, ASK]}, "'assistant' is not in list"),
    "role": (CONVERSATION, {"messages": [ASK, {"from": "critic"}, SAY]}, "unknown role 'critic'"),
    "no role": (CONVERSATION, {"messages": [{"value": "2+2?"}, SAY]}, "unknown role None"),
    "lists": (MANY, {"reward": [1]}, "lists of {'response': 2, 'reward': 1}, expected a reward"),
    "rewards of steps": (PLAIN, {"reward": [1, 0]}, "rewards of steps, as in PRM800K"),
    "no ids of the policy": (IDS, {"response_ids": [280]}, "a token id is not in the vocabulary"),
    "log-probs": (IDS, {"logprobs": [-1.0]}, "up to 0, one for each token id of the response"),
    "NaN as log-prob": (IDS, {"logprobs": [-1.0, float("nan")]}, "must be finite numbers up to 0"),
    "probabilities": (IDS, {"logprobs": [0.9, 0.5]}, "must be finite numbers up to 0"),
    "infinite log-prob": (IDS, {"logprobs": [-1.0, -float("inf")]}, "must be finite numbers up to"),
    "id of padding": (IDS, {"response_ids": [70, -100]}, "row 2 cannot be imported"),
    "null log-prob": (IDS, {"logprobs": [None, -1.0]}, "not supported between instances of"),
    "reward": (PLAIN, {"reward": "high"}, "could not convert string to float: 'high'): {'prompt':"),
    "null prompt": (PLAIN, {"prompt": None}, "no prompt was found"),
    "half a pair": (PLAIN, {"gold": "\ud800"}, "'utf-8' codec can't encode"),
    "empty response": (PLAIN, {"response": "", "finished": False}, "response is empty; drop"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_is_named(run, chat, name):
    good, changes, words = MALFORMED[name]
    jsonl(run.folder / "bad.jsonl", [good, good | changes])
    arguments = ["import", "bad.jsonl", f"--policy={chat}", "--out=a.parquet"]
    assert words in rejected(run, "bad.jsonl, row 2 cannot", *arguments, main=main)
    jsonl(run.folder / "bad.jsonl", [good])
    assert run(main, *arguments)[0] == 0


MISFITS = {  # rows that no option reads as they are, options, words of the error
    "no reward": ({"problem": "2+2?", "generations": ["4"]}, [], "problem, generations; expected"),
    "PRM800K": (
        {
            "labeler": "a1", "timestamp": "2022-07-17", "generation": 9,
            "is_quality_control_question": False, "is_initial_screening_question": False,
            "question": {"problem": "2+2?", "ground_truth_answer": "4"},
            "label": {"steps": [], "total_time": 7, "finish_reason": "solution"},
        },
        [], "rewards of steps, as in PRM800K",
    ),
    "Math-Shepherd": (
        {"input": "2+2? Step 1: 4 \u043a\u0438", "label": "2+2? Step 1: 4 +", "task": "GSM8K"},
        [], "rewards of steps, as in PRM800K and Math-Shepherd",
    ),
    "missing key": (PLAIN, ["--reward=score"], "found the keys prompt, response, reward; expected"),
    "missing key of a record": (
        PLAIN | {"answers": [{"text": "4"}]},
        ["--response=answers.text", "--reward=answers.rank"], "has no attribute 'rank'",
    ),
    "ids as messages": (IDS, ["--prompt=prompt_ids", "--response='4'"], "no attribute 'items'"),
    "no expression": (PLAIN, ["--reward=score >"], "a path or a Jinja expression (unexpected"),
    "no stored log-probs": (PLAIN, ["--log_mu=stored"], "--log_mu stored needs log-probs of all"),
    "scale": (PLAIN, ["--scale", "1"], "argument --scale: expected 2 arguments"),
    "empty scale": (PLAIN, ["--scale", "1", "1"], "division by zero"),
    "threshold": (PLAIN | {"reward": "high"}, ["--threshold=1"], "could not convert string to"),
    "NaN": (PLAIN | {"reward": float("nan")}, ["--threshold=1"], "the reward is NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_gets_a_sentence(run, chat, name):
    row, options, words = MISFITS[name]
    jsonl(run.folder / "a.jsonl", [row])
    rejected(
        run, words, "import", "a.jsonl", *options, f"--policy={chat}", "--out=a.parquet", main=main
    )


def test_arguments_of_import(run, policy, tmp_path):
    jsonl(tmp_path / "a.jsonl", [PLAIN])
    good = ["import", "a.jsonl", f"--policy={policy}", "--out=a.parquet"]
    for argument, words in (
        (f"--out={tmp_path}", "exists; name another"),
        ("--out=a.jsonl/b.parquet", "--out: the folder a.jsonl cannot be written"),
        ("--policy=nowhere", "policy 'nowhere' is neither a folder nor a model"),
    ):
        rejected(run, words, *good, argument, main=main)
    assert run(main, *good)[0] == 0
