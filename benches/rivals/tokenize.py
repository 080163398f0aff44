"""First member of the ensemble: TEXT -> INPUT_IDS and ATTENTION_MASK, padded within a request."""

import engines


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = engines.Tokenizer(engines.parameters(args)["tokenizer"])

    def execute(self, requests):
        texts = [engines.texts_of(request) for request in requests]
        rows = iter(self.tokenizer.all_ids([text for some in texts for text in some]))
        responses = []
        for some in texts:
            ids, mask = engines.pad([next(rows) for _ in some])
            responses.append(engines.response(INPUT_IDS=ids, ATTENTION_MASK=mask))
        return responses
