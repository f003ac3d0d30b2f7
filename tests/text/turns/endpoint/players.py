"""Programs of the tests: each plays a row as its ground truth says, with nothing but the standard library."""

import http.client
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from urllib.parse import urlsplit

END = {"role": "user", "content": "7"}


def connect():
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    return http.client.HTTPConnection(address.hostname, address.port)


def send(body, path="chat/completions", key=None):
    """Return the connection that waits for the answer."""
    connection = connect()
    headers = {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", f"/v1/{path}", body if isinstance(body, bytes) else json.dumps(body), headers)
    return connection


def ask(body, path="chat/completions", key=None):
    """Return status and text of the answer."""
    answer = send(body, path, key).getresponse()
    return answer.status, answer.read().decode()


def chat(messages, **body):
    return ask({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 3, **body})


def said(messages, **body):
    status, text = chat(messages, **body)
    assert status == 200, text
    return json.loads(text)["choices"][0]["message"]


def play(row):
    return globals()[row["ground_truth"]](list(row["prompt"]))


def good(messages):
    for _ in range(3):
        messages += [said(messages), END]
    return 0.25


def silent(messages):
    return 1.0


def crashes(messages):
    said(messages)
    raise RuntimeError("no more")


def endless(messages):
    while True:
        chat(messages)
        time.sleep(0.1)


def sends_100_mb(messages):
    try:
        status, _ = ask(b" " * 100_000_000)
    except OSError:  # the connection was closed before all was sent
        status = 413
    said(messages)
    return float(status == 413)


def asks_for_another_model(messages):
    said(messages)
    return float(chat(messages, model="gpt-4o")[0] == 404)


def uses_another_key(messages):
    said(messages)
    return float(ask({}, key="guessed")[0] == 401)


def disconnects_in_a_stream(messages):
    content = json.dumps({"model": "policy", "messages": messages, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        connection.recv(20)
    said(messages)
    return 1.0


def sends_no_json(messages):
    said(messages)
    return float([ask(body)[0] for body in (b"{", b"[]", b"\xff" * 9)] == [400] * 3)


def streams(messages):
    whole = chat(messages, stream=True, stream_options={"include_usage": True})[1].strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in whole[:-1]]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    messages += [{"role": "assistant", "content": text}, END]
    said(messages)
    return float(whole[-1] == "data: [DONE]" and events[-1]["usage"]["completion_tokens"] > 0)


def forks(messages):
    """Three continuations at a time, of which one is continued with a compressed history."""
    messages += [said(messages), END]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: said(messages), range(3)))
    said([*messages, answers[0], END])
    said([{"role": "user", "content": answers[0]["content"][:1]}])
    return 1.0


def forks_once(messages):
    """Two continuations of one history."""
    messages += [said(messages), END]
    return len({said(messages)["content"] for _ in range(2)}) + len(messages[-2]["content"])


def fills_the_context(messages):
    """A conversation that grows until a call leaves no room."""
    while (answer := chat(messages, max_tokens=8))[0] == 200:
        messages += [json.loads(answer[1])["choices"][0]["message"], END]
    return float(json.loads(answer[1])["error"]["code"] == "context_length_exceeded")


def hangs_up(messages):
    """Makes a call and closes its connection while the policy samples, as a client with a timeout does."""
    connection = send({"model": os.environ["OPENAI_MODEL"], "messages": messages})
    while not os.path.exists(os.environ["SAMPLING_STARTED"]):
        time.sleep(0.01)
    connection.close()
    return 1.0


def hangs_up_and_repeats(messages):
    hangs_up(messages)
    said(messages)
    return 1.0


def pays_itself(messages):
    said(messages)
    assert ask({"reward": "much"}, "reward")[0] == 400
    return ask({"reward": 0.75}, "reward")[0] - 200.0  # what it sent counts


def leaves_a_thread(messages):
    """The thread calls the policy as soon as it finds the key of another episode."""
    own = os.environ["OPENAI_API_KEY"]

    def straggle():
        while os.environ.get("OPENAI_API_KEY", own) == own:
            time.sleep(0.001)
        chat([{"role": "user", "content": "8"}])

    Thread(target=straggle, name="straggler", daemon=True).start()
    said(messages)
    return 1.0


if __name__ == "__main__":
    print("hello")
    print(play(json.load(sys.stdin)))
