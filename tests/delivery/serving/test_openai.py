"""OpenAI's routes: options of the search, several answers, streams, logprobs, chats."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
from serving_kit import FIELDS, RECORDS, Server, serving

from fivetune.delivery.serving.body import RequestError
from fivetune.delivery.serving.openai import AnswerForm, Asked, choose_decoding, read_completion_request
from fivetune.delivery.serving.schema import RunFacts
from fivetune.model.decode import Decoding, Sampling
from fivetune.rundir.records import Candidate, Prediction
from fivetune.training.answers.listening import WrittenToken
from fivetune.training.answers.trained_run import TrainedRun

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who came?"}]
LOGGED = ("tokens", "token_logprobs")
ASKS_TOP = {"messages": CHAT, "logprobs": True, "top_logprobs": 2}


@pytest.fixture(scope="module")
def server(trained: TrainedRun) -> Generator[Server]:
    own = replace(trained.loaded.build_decoding(), min_new_tokens=4)  # so that it writes something
    facts = {"run": RunFacts("run", "squad_v2", 6, FIELDS, own)}
    with serving({"run": trained.predict_each}, facts=facts) as found:
        yield found


def complete(server: Server, **options: Any) -> Any:
    path = "/v1/chat/completions" if "messages" in options else "/v1/completions"
    code, found = server.post(path, json=options)
    assert code == 200, found
    return found


def stream(server: Server, **options: Any) -> list[Any]:
    path = "/v1/chat/completions" if "messages" in options else "/v1/completions"
    answer = server.client.post(path, json={**options, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def join(events: list[Any], index: int = 0) -> str:
    chosen = [one for event in events for one in event["choices"] if one["index"] == index]
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in chosen)


def test_a_seed_repeats_an_answer_and_n_draws_several(server: Server, trained: TrainedRun) -> None:
    prompt = trained.predict(RECORDS[:1])[0].inputs
    asked = {"prompt": prompt, "temperature": 2, "seed": 5, "n": 3}
    first, again = complete(server, **asked), complete(server, **asked)
    texts = [one["text"] for one in first["choices"]]
    assert texts == [one["text"] for one in again["choices"]] and len(set(texts)) > 1
    assert [one["index"] for one in first["choices"]] == [0, 1, 2]
    assert first["usage"]["completion_tokens"] > 3
    drawn = {complete(server, prompt=prompt, temperature=2)["choices"][0]["text"] for _ in range(4)}
    assert len(drawn) > 1
    best = complete(server, prompt=prompt, n=2)["choices"]
    assert best[0]["text"] != best[1]["text"]


def test_lists_of_predict_take_the_options_of_the_search(server: Server, trained: TrainedRun) -> None:
    asked = {"inputs": RECORDS[:2], "temperature": 2, "top_k": 4, "n": 3, "seed": 5}
    found = server.post(json=asked)[1]["predictions"]
    assert found == server.post(json=asked)[1]["predictions"]
    texts = [one["text"] for one in found[0]["candidates"]]
    prompt = trained.predict(RECORDS[:1])[0].inputs
    drawn = complete(server, prompt=prompt, **{name: asked[name] for name in ("temperature", "top_k", "n", "seed")})
    assert len(texts) == 3 and texts == [one["text"] for one in drawn["choices"]]
    best = {"inputs": RECORDS[:1], "temperature": 2, "top_k": 1}
    assert server.post(json=best)[1]["predictions"][0]["prediction"] == found_best(server)
    for wrong, message in (({"topk": 1}, "Did you mean top_k"), ({"n": 9}, "n: "), ({"temperature": "2"}, "temper")):
        code, refused = server.post(json={"inputs": RECORDS[:1], **wrong})
        assert code == 422 and message in refused["error"]["message"]


def test_a_record_of_predict_takes_the_options_too(server: Server) -> None:
    asked = {"temperature": 2, "top_k": 4, "n": 3, "seed": 5}
    code, found = server.post(json={**RECORDS[0], **asked})
    assert code == 200 and found == server.post(json={"inputs": RECORDS[:1], **asked})[1]["predictions"][0]
    code, refused = server.post(json={**RECORDS[0], "temperature": 3})
    assert code == 422 and "out of range" in refused["error"]["message"]


def found_best(server: Server) -> str:
    return server.post(json={"inputs": RECORDS[:1]})[1]["predictions"][0]["prediction"]


def test_tokens_are_streamed_and_make_the_answer(server: Server, trained: TrainedRun) -> None:
    prompt = trained.predict(RECORDS[:1])[0].inputs
    for options in ({"prompt": [prompt, "who?"]}, {"messages": CHAT}, {"prompt": prompt, "temperature": 2, "seed": 1}):
        whole = complete(server, **options)
        events = stream(server, **options, logprobs=True if "messages" in options else 0)
        for one in whole["choices"]:
            text = one["text"] if "text" in one else one["message"]["content"]
            assert join(events, one["index"]) == text
            own = [part for event in events for part in event["choices"] if part["index"] == one["index"]]
            assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [one["finish_reason"]]
            assert len(own) > 2 or not text  # several pieces
    usage = stream(server, prompt=prompt, stream_options={"include_usage": True})[-1]
    assert usage["choices"] == [] and usage["usage"] == complete(server, prompt=prompt)["usage"]


def test_logprobs_are_those_of_the_tokens(server: Server, trained: TrainedRun) -> None:
    short = replace(trained.loaded.build_decoding(), max_new_tokens=3, min_new_tokens=3)
    one = trained.predict_each([RECORDS[:1]], decoding=short)[0][0]
    choice = complete(server, prompt=one.inputs, max_tokens=3, logprobs=0)["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert one.hit_cap and sum(found["token_logprobs"]) == pytest.approx(one.logprob, rel=1e-4)
    assert [choice["text"][place:][:1] for place in found["text_offset"]] == [part[:1] for part in found["tokens"]]
    chat = complete(server, messages=CHAT, logprobs=True)["choices"][0]
    assert "".join(part["token"] for part in chat["logprobs"]["content"]) == chat["message"]["content"]
    # Greedy search writes the most probable token; the others are not known. A search with beams has runners-up.
    first = complete(server, prompt=one.inputs, max_tokens=3, logprobs=1)["choices"][0]["logprobs"]
    assert first["top_logprobs"] == [{part: log} for part, log in zip(*map(found.get, LOGGED), strict=True)]
    drawn = {"prompt": "a", "logprobs": 1, "temperature": 1}
    for path, body, allowed in (("completions", drawn, "0."), ("chat/completions", ASKS_TOP, "0 or 1.")):
        code, refused = server.post(f"/v1/{path}", json=body)
        assert code == 422 and f"only its own log p is known. Allowed is {allowed}" in refused["error"]["message"]
    best = complete(server, prompt=one.inputs, n=2, logprobs=2)["choices"][0]["logprobs"]["top_logprobs"][0]
    assert len(best) == 2


def test_stop_and_max_tokens_end_an_answer(server: Server, trained: TrainedRun) -> None:
    prompt = trained.predict(RECORDS[:1])[0].inputs
    text = complete(server, prompt=prompt)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    expected = text[: text.find(stop)].rstrip()
    found = complete(server, prompt=prompt, stop=stop)["choices"][0]
    assert (found["text"], found["finish_reason"]) == (expected, "stop")
    assert join(stream(server, prompt=prompt, stop=stop)) == expected
    short = complete(server, prompt=prompt, max_tokens=2)
    assert short["usage"]["completion_tokens"] == 2 and short["choices"][0]["finish_reason"] == "length"


def test_a_stream_of_what_cannot_be_answered_is_refused(server: Server) -> None:
    code, found = server.post("/v1/completions", json={"prompt": "", "stream": True})
    assert code == 422 and found["error"]["type"] == "invalid_record"


def test_options_that_change_nothing_share_batches() -> None:
    own = Decoding(8)
    usual = read_completion_request({"prompt": "a", "temperature": 0, "n": 1, "max_tokens": 256}, max_records=1)
    assert choose_decoding(usual, own, writes=True) == own
    assert choose_decoding(Asked(["a"], temperature=0.7, top_p=0), own, writes=True) == own
    drawn = choose_decoding(Asked(["a"], temperature=0.7), own, writes=True)
    assert drawn.sampling == Sampling(0.7, seed=None)
    kept = Decoding(8, sampling=Sampling(0.5, 9, 0.8, 3))
    assert choose_decoding(Asked(["a"]), kept, writes=True) == kept
    assert choose_decoding(Asked(["a"], temperature=0), kept, writes=True) == own
    labels = Decoding(8, label_ids=((5, 1), (6, 1)))
    assert choose_decoding(Asked(["a"], temperature=0.7, max_tokens=1, num_answers=2), labels, writes=True) == labels
    with pytest.raises(RequestError, match="n: 3"):
        choose_decoding(Asked(["a"], num_answers=3), labels, writes=True)
    assert choose_decoding(Asked(["a"], num_answers=3), own, writes=False).num_candidates == 3


def test_labels_have_the_logprobs_of_the_whole_answer() -> None:
    found = Prediction(
        id="0", prediction="b", confidence=0.6, candidates=(Candidate("b", 0.6), Candidate("a", 0.4)), num_tokens=1
    )
    form = AnswerForm(Asked(["x"], num_answers=2, logprobs=2), "run", stop=(), sends_tokens=False)
    choices: Any = form.build_whole([found])["choices"]
    assert [one["text"] for one in choices] == ["b", "a"]
    assert choices[0]["logprobs"]["token_logprobs"] == pytest.approx([-0.5108], abs=1e-4)
    assert choices[0]["logprobs"]["tokens"] == ["b"]
    assert choices[0]["logprobs"]["top_logprobs"][0] == pytest.approx({"b": -0.5108, "a": -0.9163}, abs=1e-4)


def test_what_may_become_a_stop_text_is_held_back() -> None:
    form = AnswerForm(Asked(["x"], stream=True), "run", stop=("END",), sends_tokens=True)
    sent: list[str] = []
    for text in ("one", " E", "NG", " EN", "D two"):
        piece: Any = form.add_token(WrittenToken(0, 0, text, -0.1, False))
        sent.append(piece["choices"][0]["text"] if piece else "")
    assert sent == ["one", "", " ENG", "", ""]
    rest: Any = list(form.build_rest([Prediction(id="0", prediction="one ENG")]))
    assert [one["choices"][0]["finish_reason"] for one in rest] == ["stop"]
