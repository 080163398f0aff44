"""Tokenizer and encoder in one model: each text alone, so nothing is padded."""

import engines
import numpy as np


class TritonPythonModel:
    def initialize(self, args):
        said = engines.parameters(args)
        self.tokenizer = engines.Tokenizer(said["tokenizer"])
        self.run = engines.load(said)

    def execute(self, requests):
        return [
            engines.response(
                EMBEDDING=np.concatenate([self.run(self.tokenizer.ids(text)) for text in engines.texts_of(request)])
            )
            for request in requests
        ]
