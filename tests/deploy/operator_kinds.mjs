// Validates manifests of kinds that operators bring, a JSON list on standard input, with the packages of the working directory.
// Prints one line for each: "ok KIND NAME", or "bad KIND NAME: reason".
import { readFileSync } from "node:fs";

const packages = {
  "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
  "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
  "kyverno.io/v1": "@kubernetes-models/kyverno/kyverno.io/v1",
};

for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const name = `${manifest.kind} ${manifest.metadata.name}`;
  try {
    const kinds = await import(packages[manifest.apiVersion]);
    new kinds[manifest.kind](manifest).validate();
    console.log(`ok ${name}`);
  } catch (error) {
    console.log(`bad ${name}: ${error.message}`);
  }
}
