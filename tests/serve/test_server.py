"""The smaller endpoints, and how requests reach the engine."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.description import Description, SamplingDefaults
from serve.request import SamplingParams
from serve.server import bind, greeting
from tests.serve.fake_engine import FakeEngine, saying, service, tokenizer
from tests.serve.http_client import ask, client

TOKENIZER = tokenizer()
USER = [{"role": "user", "content": "Hi"}]


def seen_params(path="/v1/chat/completions", defaults=None, **body):
    """The parameters that the engine gets for a request."""
    made = service(saying("x"))
    made.defaults = defaults or made.defaults
    source = {"messages": USER} if "chat" in path else {"prompt": "x"}
    response = ask(made, path, **source, **body)
    assert response.status_code == 200, response.text
    return made.engine.engine.seen[0].params


def test_every_parameter_reaches_the_engine():
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"5": -100, "6": 2.5},
        "seed": 9,
        "max_tokens": 30,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    expected = SamplingParams(**{**body, "logit_bias": {5: -100.0, 6: 2.5}, "stop_token_ids": (7,)})
    assert seen_params(**body) == expected
    assert seen_params("/v1/completions", **body) == expected
    assert seen_params(logprobs=True, top_logprobs=3).logprobs == 3
    assert seen_params(logprobs=True).logprobs == 0
    assert seen_params("/v1/completions", logprobs=4).logprobs == 4
    assert seen_params(max_completion_tokens=12).max_tokens == 12
    assert seen_params("/v1/completions").max_tokens == 16
    assert seen_params(stop=["a", "[e~["]).stop_token_ids == (2,)


def test_what_is_not_given_comes_from_the_checkpoint():
    defaults = SamplingDefaults(temperature=0.7, top_p=0.95, top_k=40)
    params = seen_params(defaults=defaults, top_p=0.5)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.5, 40)
    # A field that is sent as null is a field that is not given.
    assert seen_params(defaults=defaults, temperature=None).temperature == 0.7


def test_choices_differ_by_index_and_prompts_share_them():
    made = service(saying("x"))
    ask(made, "/v1/completions", prompt=["a", "b"], n=2, seed=3, priority=-1)
    requests = made.engine.engine.seen
    assert [request.choice_index for request in requests] == [0, 1, 0, 1]
    assert [TOKENIZER.decode(request.prompt_ids) for request in requests] == ["a", "a", "b", "b"]
    assert {(request.params.seed, request.priority) for request in requests} == {(3, -1)}
    assert len({request.id for request in requests}) == 4


def test_a_prompt_may_be_ids_or_hold_special_tokens():
    for prompt, expected in (
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("]~b]user", [TOKENIZER.encode("]~b]user", allow_special=True)]),
    ):
        made = service(saying("x"))
        ask(made, "/v1/completions", prompt=prompt)
        assert [request.prompt_ids for request in made.engine.engine.seen] == expected


def test_a_chat_prompt_is_the_rendered_conversation():
    made = service(saying("x"))
    messages = [{"role": "user", "content": [{"type": "text", "text": "]~b]"}]}, {"role": "assistant", "content": None}]
    ask(made, "/v1/chat/completions", messages=messages, thinking_mode="adaptive")
    assert made.engine.engine.seen[0].prompt_ids == TOKENIZER.render_chat(messages, None, "adaptive")


def test_tool_results_follow_the_order_of_their_calls():
    """The model sees no ids: the n-th response belongs to the n-th call."""
    made = service(saying("x"))
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in "abc"]
    results = {name: {"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in "abc"}
    asked = {"role": "assistant", "tool_calls": calls}
    ask(
        made,
        "/v1/chat/completions",
        messages=[*USER, asked, *(results[name] for name in "cab"), *USER, asked, results["a"]],
    )
    text = TOKENIZER.decode(made.engine.engine.seen[0].prompt_ids)
    assert [part.split("<")[0] for part in text.split("<response>result ")[1:]] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    "before",
    [
        USER,
        [],
        [{"role": "assistant", "content": "Hi"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        [{"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "f", "arguments": "{}"}}]}],
        [
            {"role": "assistant", "tool_calls": [{"id": "lost", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "assistant", "content": "Hi"},
        ],
    ],
)
def test_a_tool_result_without_its_call_is_refused(before):
    messages = [*before, {"role": "tool", "tool_call_id": "lost", "content": "x"}]
    response = ask(service(saying("x")), "/v1/chat/completions", messages=messages)
    error, place = response.json()["error"], f"messages[{len(before)}].tool_call_id"
    assert response.status_code == 400 and error["param"] == place
    assert error["message"] == f"{place}: no call 'lost' in the last assistant message before it"


def test_a_tool_result_may_come_after_another_message():
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    messages = [{"role": "assistant", "tool_calls": [call]}, *USER, result]
    assert ask(service(saying("x")), "/v1/chat/completions", messages=messages).status_code == 200


def test_special_tokens_in_a_completion_show_on_request():
    for skip, text in ((True, "ab"), (False, "a<mm:think>b")):
        made = service(saying("a<mm:think>b"))
        response = ask(made, "/v1/completions", prompt="x", skip_special_tokens=skip)
        assert response.json()["choices"][0]["text"] == text


@pytest.mark.parametrize("text", ["plain é 🎉", "]~b]user\nHi[e~["])
def test_tokenize_and_back(text):
    made = service(saying("x"))
    body = ask(made, "/tokenize", prompt=text).json()
    assert body == {
        "count": len(body["tokens"]),
        "max_model_len": 4096,
        "tokens": TOKENIZER.encode(text, allow_special=True),
    }
    assert ask(service(saying("x")), "/detokenize", tokens=body["tokens"]).json() == {"prompt": text}
    chat = ask(service(saying("x")), "/tokenize", messages=USER, thinking_mode="enabled").json()
    assert chat["tokens"] == TOKENIZER.render_chat(USER, None, "enabled")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_token_endpoints_refuse_by_name(path, body, param):
    response = ask(service(saying("x")), path, **body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_stats_and_metrics_tell_the_same():
    """Against the engine's own record of steps. An answer is 1 token of prefill, then runs of 4 to its 11th token."""
    made = service(saying([50] * 10, runs=(4,)))

    async def run():
        async with client(made) as http:
            for _ in range(5):
                await http.post("/v1/chat/completions", json={"messages": USER})
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            return (await http.get("/stats")).json(), (await http.get("/metrics")).text

    stats, exposition = asyncio.run(run())
    steps = made.engine.engine.steps
    assert stats["verify_steps"] == len(steps)
    assert stats["drafted_tokens"] == sum(step.drafted for step in steps)
    assert stats["accepted_tokens"] == sum(step.accepted for step in steps)
    # Each of the six answers has one token from its prefill.
    assert stats["completion_tokens"] == sum(step.emitted for step in steps) + 6 == 5 * 11 + 2
    assert stats["acceptance_length"] == pytest.approx(stats["accepted_tokens"] / len(steps) + 1, abs=1e-9)
    rates = stats["accepted_per_position"]
    assert rates == sorted(rates, reverse=True)
    assert all(0 <= rate <= 1 for rate in rates)
    assert sum(rates) == pytest.approx(stats["acceptance_length"] - 1)
    assert stats["requests"] == {"stop": 5, "length": 1}
    assert len(stats["recent"]) == 6
    assert stats["recent"][-1]["completion_tokens"] == 2

    samples = {
        (sample.name, sample.labels.get("position") or sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }
    assert samples["spec_spec_decode_num_drafts_total", None] == stats["verify_steps"]
    assert samples["spec_spec_decode_num_draft_tokens_total", None] == stats["drafted_tokens"]
    assert samples["spec_spec_decode_num_accepted_tokens_total", None] == stats["accepted_tokens"]
    assert samples["spec_spec_decode_num_accepted_tokens_per_pos_total", "0"] == rates[0] * len(steps)
    assert samples["spec_generation_tokens_total", None] == stats["completion_tokens"]
    assert samples["spec_request_success_total", "stop"] == 5
    assert samples["spec_time_to_first_token_seconds_count", None] == 6
    assert samples["spec_inter_token_latency_seconds_count", None] == stats["completion_tokens"] - 6
    assert samples["spec_e2e_request_latency_seconds_count", None] == 6
    assert samples["spec_prefix_cache_hits_total", None] == 40
    assert samples["spec_prefix_cache_queries_total", None] == 100
    assert samples["spec_num_requests_running", None] == 0
    assert samples["spec_kv_cache_usage_perc", None] == 0


def test_gauges_show_what_runs_and_waits():
    made = service(FakeEngine(lambda request: [50], running=2, seconds=0.01))

    async def run():
        async with client(made) as http:
            body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
            tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
            while len(made.engine.engine.requests) < 3:
                await asyncio.sleep(0.01)
            text = (await http.get("/metrics")).text
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return text

    text = asyncio.run(run())
    assert 'spec_num_requests_running{model_name="fake"} 2.0' in text
    assert 'spec_num_requests_waiting{model_name="fake"} 1.0' in text
    assert 'spec_kv_cache_usage_perc{model_name="fake"} 0.03125' in text


def test_the_greeting_says_what_and_where():
    with bind("127.0.0.1", 0) as listener:
        text = greeting(service(saying("x")), Description("t", None, SamplingDefaults(), ("one", "two")), listener)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    assert text.startswith("one\ntwo\n")
    assert f"serving fake at {url}" in text
    assert f"curl {url}/chat/completions" in text
