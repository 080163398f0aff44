"""Second member of the ensemble: the requests of a batch as one batch, padded to its longest row."""

import engines
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.run = engines.load(engines.parameters(args))

    def execute(self, requests):
        parts = [
            [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT_IDS", "ATTENTION_MASK")]
            for request in requests
        ]
        rows, length = sum(len(ids) for ids, _ in parts), max(ids.shape[1] for ids, _ in parts)
        batch, row = np.zeros((2, rows, length), np.int32), 0
        for ids, mask in parts:
            batch[0, row : row + len(ids), : ids.shape[1]] = ids
            batch[1, row : row + len(ids), : ids.shape[1]] = mask
            row += len(ids)
        embeddings = self.run(*batch)
        responses, row = [], 0
        for ids, _ in parts:
            responses.append(engines.response(EMBEDDING=embeddings[row : row + len(ids)]))
            row += len(ids)
        return responses
