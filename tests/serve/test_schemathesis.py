import httpx, pytest, schemathesis
from hypothesis import settings, HealthCheck, given
from schemathesis import GenerationMode
@pytest.fixture(scope="session")
def api_schema(embedded_server):
    return schemathesis.openapi.from_url(f"{embedded_server.url}/openapi.json")
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("op", [("/v1/chat/completions","POST"),("/v1/completions","POST"),("/tokenize","POST"),("/detokenize","POST"),("/v1/models","GET"),("/v1/models/{model_id}","GET"),("/health","GET"),("/metrics","GET")], ids=str)
def test_api(api_schema, op, mode):
    operation = api_schema[op[0]][op[1]]
    seen = []
    @settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        if isinstance(case.body, dict) and 'model' in case.body and isinstance(case.body['model'], str): case.body['model']='embedded'
        if isinstance(case.body, dict) and isinstance(case.body.get('max_tokens'), int): case.body['max_tokens']%=5
        if isinstance(case.body, dict) and isinstance(case.body.get('max_completion_tokens'), int): case.body['max_completion_tokens']%=5
        r = case.call_and_validate(timeout=20)
        seen.append(r.status_code)
    check()
    print(sorted(seen))
