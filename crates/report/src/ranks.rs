//! Report of what one rank holds.

use wire::{RankBudget, RankBytes, RankModel, RankRate};

use crate::units::{count, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// `4 + 12/64`, and `4` or `16/64` where that is all.
fn divided(every: u64, divided: u64, divisor: u64) -> String {
    match (every, divided) {
        (0, 0) => "0".into(),
        (every, 0) => every.to_string(),
        (0, divided) => format!("{divided}/{divisor}"),
        (every, divided) => format!("{every} + {divided}/{divisor}"),
    }
}

/// The names of `rows` under `name`, each once, in their order.
fn distinct<'a, T>(rows: &'a [T], name: impl Fn(&'a T) -> &'a str) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&name(row)) {
            names.push(name(row));
        }
    }
    names
}

/// A row a recipe and a column a division; nothing where nobody runs it.
fn matrix<T>(
    title: String,
    rows: &[T],
    names: impl for<'a> Fn(&'a T) -> (&'a str, &'a str),
    cell: impl Fn(&T) -> String,
) -> Block {
    let kinds = distinct(rows, |row| names(row).0);
    let line = |recipe: &str| {
        let at =
            |kind: &&str| rows.iter().find(|row| names(row) == (*kind, recipe)).map_or("-".into(), &cell);
        std::iter::once(recipe.to_owned()).chain(kinds.iter().map(at)).collect()
    };
    Block::Table {
        title: Some(title),
        columns: std::iter::once(Column::words("recipe"))
            .chain(kinds.iter().map(|kind| Column::numbers(*kind)))
            .collect(),
        rows: distinct(rows, |row| names(row).1).into_iter().map(line).collect(),
    }
}

fn rates(budget: &RankBudget) -> Block {
    let row = |rate: &RankRate| {
        let part = |part: wire::RankPart| {
            let (every, parted) = if part.divided { (0, part.bytes) } else { (part.bytes, 0) };
            divided(every, parted, rate.divisor)
        };
        vec![
            rate.recipe.clone(),
            part(rate.parameter),
            part(rate.gradient),
            part(rate.master_weight),
            part(rate.optimizer_state),
            divided(rate.on_every_rank, rate.divided, rate.divisor),
            part(rate.update_gradient),
        ]
    };
    Block::Table {
        title: Some(format!("Bytes a parameter under {}", budget.parallel)),
        columns: vec![
            Column::words("recipe"),
            Column::numbers("weight"),
            Column::numbers("gradient"),
            Column::numbers("master"),
            Column::numbers("Adam"),
            Column::numbers("sum"),
            Column::numbers("in the update"),
        ],
        rows: budget.rates.iter().filter(|rate| rate.parallel == budget.parallel).map(row).collect(),
    }
}

fn exact(budget: &RankBudget, name: &str, model: &RankModel) -> Block {
    let row = |row: &RankBytes| {
        let parts = [
            row.parameter_bytes,
            row.gradient_bytes,
            row.master_weight_bytes,
            row.optimizer_state_bytes,
            row.bytes,
            row.padding_bytes,
        ];
        std::iter::once(row.recipe.clone()).chain(parts.map(thousands)).collect()
    };
    Block::Table {
        title: Some(format!("Bytes of {name} on rank {} under {}", budget.rank, budget.parallel)),
        columns: std::iter::once(Column::words("recipe"))
            .chain(["weights", "gradients", "masters", "Adam", "sum", "padding in it"].map(Column::numbers))
            .collect(),
        rows: model.rows.iter().filter(|row| row.parallel == budget.parallel).map(row).collect(),
    }
}

impl Report for RankBudget {
    fn page(&self) -> Page {
        let groups = self.shard_size.map_or_else(String::new, |size| format!(" in groups of {size}"));
        let mut blocks = vec![
            Block::Line(format!("Rank {} of {}{groups}, {}", self.rank, self.world_size, self.parallel)),
            rates(self),
            matrix(
                "Bytes a parameter on one rank".into(),
                &self.rates,
                |rate| (&rate.parallel, &rate.recipe),
                |rate| format!("{:.2}", rate.bytes_per_parameter),
            ),
        ];
        for model in &self.models {
            let small = model.rows.iter().all(|row| row.bytes < 10_000_000_000);
            let decimals = if small { 3 } else { 1 };
            blocks.extend(model.name.as_ref().map(|name| exact(self, name, model)));
            blocks.push(matrix(
                format!("{} parameters, 10^9 B on one rank", count(model.parameters)),
                &model.rows,
                |row| (&row.parallel, &row.recipe),
                |row| format!("{:.decimals$}", row.bytes as f64 / 1e9),
            ));
        }
        blocks.push(Block::List {
            title: "Not in these figures".into(),
            items: self.interpretation_limits.clone(),
        });
        Page { blocks }
    }

    fn sheet(&self) -> Sheet {
        let of_model = |model: &'_ RankModel| -> Vec<Vec<String>> {
            let cells = |(row, rate): (&RankBytes, &RankRate)| {
                let bytes = [
                    row.parameter_bytes,
                    row.gradient_bytes,
                    row.master_weight_bytes,
                    row.optimizer_state_bytes,
                    row.bytes,
                    row.padding_bytes,
                    row.update_gradient_bytes,
                ];
                [model.name.clone().unwrap_or_default(), model.parameters.to_string()]
                    .into_iter()
                    .chain([row.parallel.clone(), row.recipe.clone(), rate.on_every_rank.to_string()])
                    .chain([rate.divided, rate.divisor].map(|number| number.to_string()))
                    .chain(bytes.map(|number| number.to_string()))
                    .collect()
            };
            model.rows.iter().zip(&self.rates).map(cells).collect()
        };
        Sheet {
            head: vec![
                "model",
                "parameters",
                "parallel",
                "recipe",
                "on_every_rank",
                "divided",
                "divisor",
                "parameter_bytes",
                "gradient_bytes",
                "master_weight_bytes",
                "optimizer_state_bytes",
                "bytes",
                "padding_bytes",
                "update_gradient_bytes",
            ],
            rows: self.models.iter().flat_map(of_model).collect(),
        }
    }
}
