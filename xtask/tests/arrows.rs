//! Who may depend on whom. The house is drawn in ARCHITECTURE.md; this keeps it standing.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

/// The crates of this workspace that each may use. A crate that is not here may not be there.
const MAY_USE: &[(&str, &[&str])] = &[
    ("ledger", &[]),
    ("engine", &["ledger"]),
    ("allocator", &["ledger"]),
    ("evidence", &["ledger"]),
    ("wire", &["ledger"]),
    ("models", &["engine", "ledger"]),
    ("report", &["ledger", "wire"]),
    ("vramledger", &["allocator", "engine", "evidence", "ledger", "models", "wire"]),
    ("vramledger-cli", &["report", "vramledger"]),
    ("python", &["report", "vramledger", "vramledger-cli"]),
    ("emulator", &[]),
    ("xtask", &["allocator", "engine", "evidence", "ledger", "models", "report", "vramledger", "wire"]),
];

/// Crates of others that only some of ours may use: files and forms stay out of the core, the
/// command line out of the libraries, Python in its package.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("serde", &["evidence", "models", "vramledger", "vramledger-cli", "python", "wire", "xtask"]),
    ("serde_json", &["evidence", "models", "vramledger", "python", "wire", "xtask"]),
    ("schemars", &["wire"]),
    ("toml", &["vramledger-cli"]),
    ("zstd", &["evidence", "wire"]),
    ("flate2", &["evidence", "xtask"]),
    ("memmap2", &["evidence", "vramledger", "vramledger-cli"]),
    ("clap", &["vramledger-cli", "xtask"]),
    ("anyhow", &["python", "vramledger-cli", "xtask"]),
    ("anstream", &["python", "vramledger-cli"]),
    ("comfy-table", &["report"]),
    ("textwrap", &["report"]),
    ("pyo3", &["python"]),
    ("arrow-array", &["python"]),
    ("arrow-schema", &["python"]),
];

fn metadata() -> Metadata {
    MetadataCommand::new().no_deps().exec().expect("cargo describes the workspace")
}

/// What each crate of the workspace depends on, tests aside.
fn dependencies(metadata: &Metadata) -> BTreeMap<String, BTreeSet<String>> {
    let of = |package: &cargo_metadata::Package| {
        let kept =
            package.dependencies.iter().filter(|dependency| dependency.kind != DependencyKind::Development);
        (package.name.to_string(), kept.map(|dependency| dependency.name.clone()).collect())
    };
    metadata.workspace_packages().into_iter().map(of).collect()
}

#[test]
fn arrows_point_down() {
    let metadata = metadata();
    let dependencies = dependencies(&metadata);
    for (package, uses) in &dependencies {
        let allowed = MAY_USE.iter().find(|(name, _)| name == package).map(|(_, allowed)| *allowed);
        let allowed = allowed.unwrap_or_else(|| panic!("`{package}` is not in the drawing of the house"));
        for used in uses.iter().filter(|used| dependencies.contains_key(*used)) {
            assert!(allowed.contains(&used.as_str()), "`{package}` may not use `{used}`");
        }
    }
}

#[test]
fn libraries_stay_where_they_belong() {
    for (package, uses) in dependencies(&metadata()) {
        for (library, places) in ONLY_IN {
            let misplaced = uses.contains(*library) && !places.contains(&package.as_str());
            assert!(!misplaced, "`{package}` may not use `{library}`; only {places:?} may");
        }
    }
}

/// The crates that may say `unsafe`, and so state the lints of the workspace themselves.
const UNSAFE: &[&str] = &["emulator", "python"];

#[test]
fn every_crate_obeys_the_lints_of_the_workspace() {
    let metadata = metadata();
    let root =
        std::fs::read_to_string(metadata.workspace_root.join("Cargo.toml")).expect("the root's manifest");
    let lints = root.split("[workspace.lints.rust]").nth(1).and_then(|rest| rest.split("[profile").next());
    let is_lint =
        |line: &&str| line.contains(" = ") && !line.starts_with('#') && !line.starts_with("unsafe_code");
    let lints: Vec<&str> = lints.expect("the lints of the workspace").lines().filter(is_lint).collect();
    assert!(!lints.is_empty());
    for package in metadata.workspace_packages() {
        let manifest = std::fs::read_to_string(&package.manifest_path).expect("a manifest that cargo found");
        if UNSAFE.contains(&package.name.as_str()) {
            for lint in &lints {
                assert!(manifest.contains(lint), "`{}` has no `{lint}`", package.name);
            }
        } else {
            assert!(
                manifest.contains("[lints]\nworkspace = true"),
                "`{}` has lints of its own",
                package.name
            );
        }
    }
}
