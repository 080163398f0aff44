"""Tokenizer and encoder in one model: the texts of a batch sorted by length, and padded in chunks of 8."""

import engines
import numpy as np

CHUNK = 8


class TritonPythonModel:
    def initialize(self, args):
        said = engines.parameters(args)
        self.tokenizer = engines.Tokenizer(said["tokenizer"])
        self.run = engines.load(said)

    def execute(self, requests):
        texts = [engines.texts_of(request) for request in requests]
        rows = self.tokenizer.all_ids([text for some in texts for text in some])
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        embeddings = [None] * len(rows)
        for begin in range(0, len(rows), CHUNK):
            chunk = order[begin : begin + CHUNK]
            for i, embedding in zip(chunk, self.run(*engines.pad([rows[i] for i in chunk]))):
                embeddings[i] = embedding
        responses, row = [], 0
        for some in texts:
            responses.append(engines.response(EMBEDDING=np.stack(embeddings[row : row + len(some)])))
            row += len(some)
        return responses
