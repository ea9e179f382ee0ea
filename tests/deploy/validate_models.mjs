// Checks Kubernetes resources (a JSON array on stdin) against the classes of kubernetes-models, which know enumerations,
// quantities and the resources of the Prometheus operator. Prints one line for each mistake; kinds it does not know are
// named on a line of their own. Argument: the folder that holds node_modules.
import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const modules = join(resolve(process.argv[2]), "node_modules");
const HOMES = { "monitoring.coreos.com": "@kubernetes-models/prometheus-operator" };
let failed = false;
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const name = `${resource.kind}/${resource.metadata.name}`;
  const group = resource.apiVersion.split("/")[0];
  if (group === "kubernetes.dask.org") {
    console.log(`unknown ${name}`);
    continue;
  }
  const home = join(modules, HOMES[group] ?? "kubernetes-models", resource.apiVersion, "index.js");
  const { [resource.kind]: Model } = await import(pathToFileURL(home));
  try {
    new Model(resource).validate();
  } catch (error) {
    failed = true;
    console.log(`${name}: ${error.message.replaceAll("\n", " ")}`);
  }
}
process.exit(failed ? 1 : 0);
