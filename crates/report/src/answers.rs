//! Reports of the small questions.

use wire::answers::{self, Budget, CheckpointBudget, CheckpointPlan, GpuCatalogue, ModelCatalogue, Tradeoff};

use crate::units::{Unit, count, flops, nominal, size, thousands};
use crate::{Block, Column, Page, Report, Sheet};

fn limits(items: &[String]) -> Block {
    Block::List { title: "Not in these figures".into(), items: items.to_vec() }
}

impl Report for Budget {
    fn page(&self) -> Page {
        let cards = &self.cards;
        let each = format!("{} ({} by the driver)", nominal(cards.nominal_bytes), size(cards.capacity_bytes));
        let recipe = |recipe: &answers::BudgetRecipe| {
            vec![
                recipe.name.clone(),
                recipe.parameter.to_string(),
                recipe.gradient.to_string(),
                recipe.master_weight.to_string(),
                recipe.optimizer_state.to_string(),
                recipe.bytes_per_parameter.to_string(),
                format!("{:.1} B", recipe.largest_model_nominal as f64 / 1e9),
                format!("{:.1} B", recipe.largest_model_capacity as f64 / 1e9),
            ]
        };
        let model = |model: &answers::BudgetModel| {
            vec![
                count(model.parameters),
                nominal(model.bytes),
                thousands(model.cards_nominal),
                thousands(model.cards_capacity),
            ]
        };
        let mut blocks = vec![
            Block::Line(format!("{} x {}, each {each}", cards.count, cards.gpu)),
            Block::Table {
                title: Some("Bytes a parameter, and the largest model that the cards hold together".into()),
                columns: vec![
                    Column::words("recipe"),
                    Column::numbers("weight"),
                    Column::numbers("gradient"),
                    Column::numbers("master"),
                    Column::numbers("Adam"),
                    Column::numbers("sum"),
                    Column::numbers("nominal"),
                    Column::numbers("driver"),
                ],
                rows: self.recipes.iter().map(recipe).collect(),
            },
        ];
        if let Some(first) = self.models.first() {
            blocks.push(Block::Table {
                title: Some(format!(
                    "Cards that a model needs at {} bytes a parameter",
                    first.bytes_per_parameter
                )),
                columns: vec![
                    Column::numbers("parameters"),
                    Column::numbers("memory (10^9 B)"),
                    Column::numbers("cards, nominal"),
                    Column::numbers("cards, driver"),
                ],
                rows: self.models.iter().map(model).collect(),
            });
        }
        let notes = self.recipes.iter().filter_map(|r| Some(format!("{}: {}", r.name, r.note.as_ref()?)));
        let items: Vec<String> = self.interpretation_limits.iter().cloned().chain(notes).collect();
        blocks.push(limits(&items));
        Page { blocks }
    }

    fn sheet(&self) -> Sheet {
        let recipe = |recipe: &answers::BudgetRecipe| {
            vec![
                "recipe".into(),
                recipe.name.clone(),
                recipe.bytes_per_parameter.to_string(),
                String::new(),
                recipe.largest_model_nominal.to_string(),
                recipe.largest_model_capacity.to_string(),
                String::new(),
                String::new(),
            ]
        };
        let model = |model: &answers::BudgetModel| {
            vec![
                "model".into(),
                model.parameters.to_string(),
                model.bytes_per_parameter.to_string(),
                model.bytes.to_string(),
                String::new(),
                String::new(),
                model.cards_nominal.to_string(),
                model.cards_capacity.to_string(),
            ]
        };
        Sheet {
            head: vec![
                "row",
                "name",
                "bytes_per_parameter",
                "bytes",
                "largest_model_nominal",
                "largest_model_capacity",
                "cards_nominal",
                "cards_capacity",
            ],
            rows: self.recipes.iter().map(recipe).chain(self.models.iter().map(model)).collect(),
        }
    }
}

/// A number of units without needless decimals.
fn units(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Report for CheckpointPlan {
    fn page(&self) -> Page {
        let row = |row: &answers::CheckpointSegment| {
            vec![
                row.segment.to_string(),
                units(row.kept_units),
                row.recomputed_units.to_string(),
                units(row.units),
                if row.segment == self.best.segment { "least".into() } else { String::new() },
            ]
        };
        Page {
            blocks: vec![
                Block::Verdict {
                    good: None,
                    text: format!(
                        "{} layers: a checkpoint every {} layers keeps least, {} units; none keeps {}",
                        self.layers,
                        self.best.segment,
                        units(self.best.units),
                        self.units_without
                    ),
                },
                Block::Table {
                    title: None,
                    columns: vec![
                        Column::numbers("layers a segment"),
                        Column::numbers("inputs kept"),
                        Column::numbers("one segment"),
                        Column::numbers("units at the peak"),
                        Column::words(""),
                    ],
                    rows: self.segments.iter().map(row).collect(),
                },
                limits(&self.interpretation_limits),
            ],
        }
    }

    fn sheet(&self) -> Sheet {
        let row = |row: &answers::CheckpointSegment| {
            vec![
                row.segment.to_string(),
                row.kept_units.to_string(),
                row.recomputed_units.to_string(),
                row.units.to_string(),
            ]
        };
        Sheet {
            head: vec!["segment", "kept_units", "recomputed_units", "units"],
            rows: self.segments.iter().map(row).collect(),
        }
    }
}

/// The strategies of `plan`, and the best one where it is another.
fn strategies(plan: &CheckpointBudget) -> Vec<&answers::CheckpointStrategy> {
    let other = plan.best.iter().filter(|best| !plan.strategies.contains(best));
    plan.strategies.iter().chain(other).collect()
}

impl Report for CheckpointBudget {
    fn page(&self) -> Page {
        let all = strategies(self);
        let unit = Unit::of_largest(all.iter().map(|row| row.peak_allocated_bytes));
        let (budget, layers) = (unit.size(self.budget_bytes), self.layers);
        let text = match &self.best {
            Some(best) => format!(
                "{layers} layers within {budget} allocated: --checkpoint {} recomputes least, {} of {} of the forward pass",
                best.checkpoint,
                flops(best.recompute_flops),
                flops(best.forward_flops)
            ),
            None => format!("{layers} layers: no checkpointing holds {budget} allocated"),
        };
        let row = |row: &&answers::CheckpointStrategy| {
            let best = self.best.as_ref() == Some(row);
            vec![
                row.name.clone(),
                unit.number(row.peak_allocated_bytes),
                match (&row.peak_phase, row.peak_step) {
                    (Some(phase), Some(step)) => format!("{phase}, step {step}"),
                    _ => String::new(),
                },
                flops(row.recompute_flops),
                if best { "best".into() } else { (if row.within_budget { "fits" } else { "" }).into() },
                row.checkpoint.clone(),
            ]
        };
        Page {
            blocks: vec![
                Block::Verdict { good: Some(self.best.is_some()), text },
                Block::Line(format!(
                    "A layer keeps {} and leaves {} to the next, as requested.",
                    unit.size(self.kept_bytes),
                    unit.size(self.input_bytes)
                )),
                Block::Table {
                    title: None,
                    columns: vec![
                        Column::words("recomputed"),
                        Column::numbers(format!("allocated {}", unit.name())),
                        Column::words("peak in"),
                        Column::numbers("recomputed a step"),
                        Column::words(""),
                        Column::words("--checkpoint"),
                    ],
                    rows: all.iter().map(row).collect(),
                },
                limits(&self.interpretation_limits),
            ],
        }
    }

    fn sheet(&self) -> Sheet {
        let row = |row: &&answers::CheckpointStrategy| {
            vec![
                row.name.clone(),
                row.checkpoint.clone(),
                row.peak_allocated_bytes.to_string(),
                row.peak_phase.clone().unwrap_or_default(),
                row.recompute_flops.to_string(),
                row.within_budget.to_string(),
            ]
        };
        Sheet {
            head: vec![
                "name",
                "checkpoint",
                "peak_allocated_bytes",
                "peak_phase",
                "recompute_flops",
                "within_budget",
            ],
            rows: strategies(self).iter().map(row).collect(),
        }
    }
}

impl Report for Tradeoff {
    fn page(&self) -> Page {
        let unit = Unit::of_largest(self.rows.iter().map(|row| row.saved_activation_bytes));
        let row = |row: &answers::TradeoffRow| {
            vec![
                row.name.clone(),
                unit.number(row.saved_activation_bytes),
                format!("{}%", row.extra_forward_fraction * 100.0),
            ]
        };
        Page {
            blocks: vec![
                Block::Line(format!("One saved tensor of {} x {} x {}", self.batch, self.seq, self.hidden)),
                Block::Table {
                    title: None,
                    columns: vec![
                        Column::words("how it is kept"),
                        Column::numbers(format!("saved {}", unit.name())),
                        Column::numbers("extra forward"),
                    ],
                    rows: self.rows.iter().map(row).collect(),
                },
                limits(&self.interpretation_limits),
            ],
        }
    }

    fn sheet(&self) -> Sheet {
        let row = |row: &answers::TradeoffRow| {
            vec![
                row.name.clone(),
                row.dtype.clone(),
                row.saved_fraction.to_string(),
                row.saved_activation_bytes.to_string(),
                row.extra_forward_fraction.to_string(),
            ]
        };
        Sheet {
            head: vec!["name", "dtype", "saved_fraction", "saved_activation_bytes", "extra_forward_fraction"],
            rows: self.rows.iter().map(row).collect(),
        }
    }
}

impl Report for ModelCatalogue {
    fn page(&self) -> Page {
        let sheet = self.sheet();
        let words = ["name", "family", "dtype"];
        let column = |head: &&str| {
            if words.contains(head) { Column::words(*head) } else { Column::numbers(head.replace('_', " ")) }
        };
        Page {
            blocks: vec![
                Block::Table {
                    title: None,
                    columns: sheet.head.iter().map(column).collect(),
                    rows: sheet.rows,
                },
                Block::Line(format!(
                    "Besides: any config.json of these families ({}), and mlp:LAYERSxWIDTH.",
                    self.families.join(", ")
                )),
            ],
        }
    }

    fn sheet(&self) -> Sheet {
        let row = |model: &answers::ModelEntry| {
            vec![
                model.name.clone(),
                model.family.clone(),
                model.layers.to_string(),
                model.hidden.to_string(),
                model.heads.to_string(),
                model.kv_heads.to_string(),
                model.vocab.to_string(),
                model.max_seq.to_string(),
                model.dtype.clone(),
            ]
        };
        Sheet {
            head: vec![
                "name", "family", "layers", "hidden", "heads", "kv_heads", "vocab", "max_seq", "dtype",
            ],
            rows: self.models.iter().map(row).collect(),
        }
    }
}

impl Report for GpuCatalogue {
    fn page(&self) -> Page {
        let row = |gpu: &answers::GpuEntry| {
            vec![
                gpu.name.clone(),
                Unit::GiB.number(gpu.capacity_bytes),
                nominal(gpu.nominal_bytes),
                gpu.compute_capability.clone(),
                gpu.multiprocessors.to_string(),
            ]
        };
        let default = self.gpus.first().map_or("", |gpu| gpu.name.as_str());
        Page {
            blocks: vec![
                Block::Table {
                    title: None,
                    columns: vec![
                        Column::words("name"),
                        Column::numbers("driver GiB"),
                        Column::numbers("sold as"),
                        Column::numbers("capability"),
                        Column::numbers("SMs"),
                    ],
                    rows: self.gpus.iter().map(row).collect(),
                },
                Block::Line(format!(
                    "{default} is the default. The driver's figure moves a little with its version and with ECC; --format json tells where each was seen."
                )),
            ],
        }
    }

    fn sheet(&self) -> Sheet {
        let row = |gpu: &answers::GpuEntry| {
            vec![
                gpu.name.clone(),
                gpu.capacity_bytes.to_string(),
                gpu.nominal_bytes.to_string(),
                gpu.compute_capability.clone(),
                gpu.multiprocessors.to_string(),
                gpu.source.clone(),
            ]
        };
        Sheet {
            head: vec![
                "name",
                "capacity_bytes",
                "nominal_bytes",
                "compute_capability",
                "multiprocessors",
                "source",
            ],
            rows: self.gpus.iter().map(row).collect(),
        }
    }
}
