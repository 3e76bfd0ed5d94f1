"""templates/serviceaccount.yaml: an identity without a token."""

from __future__ import annotations

from charts import of, one, pod_specs, with_least


def test_its_token_is_mounted_nowhere():
    manifests = with_least({"shadow": {"mode": "reference"}, "serviceAccount": {"annotations": {"a": "b"}}})
    account = one(manifests, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert account["metadata"]["annotations"] == {"a": "b"}
    for where, spec in pod_specs(manifests):
        assert spec["automountServiceAccountToken"] is False, where


def test_an_existing_one_is_used():
    manifests = with_least({"serviceAccount": {"name": "mine"}})
    assert not of(manifests, "ServiceAccount")
    assert one(manifests, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
