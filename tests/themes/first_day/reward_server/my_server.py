"""My reward server, as OpenRLHF asks it: POST {"query", "prompts", "labels"} -> {"rewards"}. It notes what it judged."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def judge(query, prompt, label):
    """1 if the response, which is what follows the prompt, is the label."""
    return float(query.removeprefix(prompt).strip() == label)


class Judge(BaseHTTPRequestHandler):
    """Answers one request."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        columns = zip(asked["query"], asked["prompts"], asked["labels"], strict=True)
        rewards = [judge(*column) for column in columns]
        with open("judged.jsonl", "a") as file:
            file.write(json.dumps(rewards) + "\n")
        answer = json.dumps({"rewards": rewards}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
with open(sys.argv[1], "w") as address:
    address.write(f"http://127.0.0.1:{server.server_port}")
server.serve_forever()
