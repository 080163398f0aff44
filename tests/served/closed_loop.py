"""Load over HTTP. A closed loop: each connection sends one request, waits for its answer and sends the next; and an
open one, which sends at given times, whatever is answered.

One thread and no client library, since it shares the processors with the server that it drives.
"""

import json
import selectors
import socket
import time
from dataclasses import dataclass


def request(model, texts, output, parameters=None, names=("TEXT",)):
    """The bytes of an HTTP request of rows of texts (tuples of them where there are more names), for one output."""
    rows = [text if isinstance(text, tuple) else (text,) for text in texts]
    inputs, data = [], b""
    for i, name in enumerate(names):
        column = [row[i].encode() for row in rows]
        tensor = b"".join(len(text).to_bytes(4, "little") + text for text in column)
        size = {"binary_data_size": len(tensor)}
        inputs.append({"name": name, "datatype": "BYTES", "shape": [len(rows), 1], "parameters": size})
        data += tensor
    outputs = [{"name": output, "parameters": {"binary_data": True}}]
    body = {"inputs": inputs, "outputs": outputs, "parameters": parameters or {}}
    header = json.dumps(body).encode()
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(header) + len(data)}\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\n\r\n"
    ).encode() + header + data


@dataclass
class Answer:
    """What came for request number `index` of the list, in the order in which answers came."""

    index: int
    sent: float
    received: float
    status: int
    body: bytes
    header_size: int

    @property
    def data(self):
        """The output's bytes, or the error's text."""
        return self.body[self.header_size :]


class Connection:
    def __init__(self, address, timeout):
        host, _, port = address.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = bytearray()

    def send(self, index, data):
        self.index = index
        self.data.clear()
        self.sent = time.monotonic()
        self.socket.sendall(data)

    def receive(self):
        """The answer, if it is complete."""
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise ConnectionError("the server closed a connection")
        self.data += piece
        head, found, _ = self.data.partition(b"\r\n\r\n")
        if not found:
            return None
        fields = dict(line.lower().split(b": ", 1) for line in bytes(head).split(b"\r\n")[1:])
        start, size = len(head) + 4, int(fields[b"content-length"])
        if len(self.data) < start + size:
            return None
        body = bytes(self.data[start : start + size])
        status = int(head.split(b" ", 2)[1])
        header = int(fields.get(b"inference-header-content-length", 0))
        return Answer(self.index, self.sent, time.monotonic(), status, body, header)


def run(address, requests, connections, timeout=30, seconds=None, gap=0):
    """Sends every request once, or in turn for so many seconds; the answers, in the order in which they came. A server
    that says nothing for `timeout` seconds is an error. The first ones of the connections are sent `gap` seconds apart."""
    selector = selectors.DefaultSelector()
    answers, sent = [], 0
    end = None if seconds is None else time.monotonic() + seconds
    more = (lambda: time.monotonic() < end) if end else (lambda: sent < len(requests))
    open_connections = [Connection(address, timeout) for _ in range(connections)]
    try:
        for connection in open_connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            if more():
                connection.send(sent % len(requests), requests[sent % len(requests)])
                sent += 1
                time.sleep(gap)
        while len(answers) < sent:
            ready = selector.select(timeout)
            if not ready:
                raise TimeoutError(f"no answer for {timeout} s; {len(answers)} of {sent} were answered")
            for key, _ in ready:
                answer = key.data.receive()
                if answer is None:
                    continue
                answers.append(answer)
                if more():
                    key.data.send(sent % len(requests), requests[sent % len(requests)])
                    sent += 1
        return answers
    finally:
        selector.close()
        for connection in open_connections:
            connection.socket.close()


def run_at(address, requests, times, timeout=30):
    """Sends request number i `times[i]` seconds from now (ascending), on a connection that is free or a new one; the
    answers, in the order in which they came, each as of the time at which it was to be sent."""
    selector = selectors.DefaultSelector()
    free, used, answers, sent = [], [], [], 0
    start = time.monotonic()
    try:
        while len(answers) < len(times):
            due = start + times[sent] - time.monotonic() if sent < len(times) else timeout
            if due <= 0:
                if free:
                    connection = free.pop()
                else:
                    connection = Connection(address, timeout)
                    used.append(connection)
                    selector.register(connection.socket, selectors.EVENT_READ, connection)
                connection.send(sent % len(requests), requests[sent % len(requests)])
                connection.sent = start + times[sent]
                sent += 1
                continue
            ready = selector.select(due)
            if not ready and sent == len(times):
                raise TimeoutError(f"no answer for {timeout} s; {len(answers)} of {sent} were answered")
            for key, _ in ready:
                answer = key.data.receive()
                if answer is not None:
                    answers.append(answer)
                    free.append(key.data)
        return answers
    finally:
        selector.close()
        for connection in used:
            connection.socket.close()
